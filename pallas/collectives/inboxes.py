"""The inboxes of a mesh's devices and the table of their addresses."""

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import UInt32

from pallas.collectives import layout
from pallas.dispatch import BLACKWELL, HOPPER, require_capability


@dataclasses.dataclass(frozen=True, eq=False)
class Inboxes:
    """What `all_reduce` sends through. The memory must live as long as a program that may use the table runs."""

    table: UInt32[jax.Array, "N W"]
    """A row for every device, on that device: see `layout.row_words`."""
    memory: tuple[UInt32[jax.Array, " M"], ...]
    """Every device's inbox. JAX neither reads nor writes it."""


def connect(mesh: Mesh) -> Inboxes:
    """Inboxes for the devices of a mesh of one axis.

    Raises `NotImplementedError` with the reason where they cannot store in one another's memory.
    """
    devices = list(mesh.devices.flat)
    if len(mesh.axis_names) != 1:
        raise NotImplementedError(f"the mesh has axes {mesh.axis_names}, one is served")
    if not 2 <= len(devices) <= layout.MOST_DEVICES:
        raise NotImplementedError(f"{len(devices)} devices, two to {layout.MOST_DEVICES} are served")
    if any(device.platform != "gpu" or device.process_index != jax.process_index() for device in devices):
        raise NotImplementedError("not all devices are GPUs of this process")
    require_capability("one-shot sum", HOPPER, BLACKWELL)
    require_peers([device.local_hardware_id for device in devices])
    return _open(devices, NamedSharding(mesh, PartitionSpec(mesh.axis_names[0])))


def played(devices: int) -> Inboxes:
    """Inboxes of so many devices that the default one plays alone: to try the kernel on one GPU."""
    return _open([jax.devices()[0]] * devices, None)


def _open(devices: Sequence[Any], sharding: NamedSharding | None) -> Inboxes:
    count = len(devices)
    words = layout.CHANNELS * layout.channel_bytes(count) // 4
    memory = [jax.numpy.full(words, layout.EMPTY, jax.numpy.uint32, device=device) for device in devices]
    jax.block_until_ready(memory)
    table = rows([part.unsafe_buffer_pointer() for part in memory])
    return Inboxes(jax.device_put(table, sharding or devices[0]), tuple(memory))


def rows(addresses: Sequence[int]) -> UInt32[np.ndarray, "N W"]:
    """The table of inboxes at these addresses."""
    count = len(addresses)
    table = np.zeros((count, layout.row_words(count) // 2), np.uint64)
    table[:, 0] = addresses
    table[:, 1] = np.arange(count)
    table[:, 2 : 2 + count] = addresses
    return table.view(np.uint32)


def require_peers(ordinals: Sequence[int]) -> None:
    """Raises `NotImplementedError` unless each of these GPUs of the CUDA driver can reach the memory of all others."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NotImplementedError(f"no CUDA driver to ask for peers: {error}") from error
    for device in ordinals:
        for peer in ordinals:
            answer = ctypes.c_int(0)
            failed = driver.cuDeviceCanAccessPeer(ctypes.byref(answer), device, peer)
            if device != peer and (failed or not answer.value):
                raise NotImplementedError(f"GPU {device} cannot reach the memory of GPU {peer}")
