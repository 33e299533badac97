"""The engine and its gRPC service; not built yet."""
