"""Messages and stubs of both protocols.

`messages` and `services` are `k3jax.v1`, compiled in memory from `k3jax.proto` beside this file; the worker protocol
of gateways, `vllm.grpc.engine`, comes compiled from the package smg-grpc-proto.
"""

from typing import Any

import grpc

messages: Any
services: Any
messages, services = grpc.protos_and_services("serving/protocol/k3jax.proto")

NATIVE = "k3jax.v1.Generate"
WORKER = "vllm.grpc.engine.VllmEngine"
