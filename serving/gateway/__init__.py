"""The OpenAI world: smg, a Rust gateway, in front of the service, and a chat page beside it."""
