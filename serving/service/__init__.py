"""The gRPC service: both protocols, health, reflection, and what an operator needs around them."""
