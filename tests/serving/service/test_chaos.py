"""What goes wrong around a service: networks, clocks, disks and files (checklist 12 to 14).

The process that is killed is in `test_process.py`; ranks that die are not tested, since an engine has one process.
"""

import asyncio
import contextlib
import resource
import shutil
import socket
import threading
import time

import grpc
import pytest

import checkpoints
import serving
from serving.protocol import services
from tests.serving.fake_runner import solo
from tests.serving.service.conftest import nano
from tests.serving.service.test_operations import health


class Network:
    """A way to a server on which all bytes take `delay` seconds, and which can stop or break."""

    def __init__(self, address, delay=0.0):
        self._host, self._port = address.split(":")
        self._delay, self._writers, self._tasks = delay, [], set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._flows = asyncio.Event()
        self._flows.set()
        self._server = self._do(asyncio.start_server(self._connect, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _connect(self, reader, writer):
        there, back = await asyncio.open_connection(self._host, self._port)
        self._writers += [writer, back]
        for source, sink in ((reader, back), (there, writer)):
            bytes_ = asyncio.Queue()
            for work in (self._read(source, bytes_), self._write(bytes_, sink)):
                task = asyncio.ensure_future(work)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _read(self, source, bytes_):
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                bytes_.put_nowait((self._loop.time() + self._delay, data))
        bytes_.put_nowait((0.0, None))

    async def _write(self, bytes_, sink):
        while True:
            due, data = await bytes_.get()
            await asyncio.sleep(max(due - self._loop.time(), 0.0))
            await self._flows.wait()
            if data is None:
                sink.close()
                return
            sink.write(data)

    def stop(self):
        self._loop.call_soon_threadsafe(self._flows.clear)

    def cut(self):
        self._loop.call_soon_threadsafe(lambda: [writer.transport.abort() for writer in self._writers])

    def close(self):
        async def end():
            self._server.close()
            for writer in self._writers:
                writer.transport.abort()
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.sleep(0)

        self._do(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def network():
    """A function that lays a network before a server."""
    laid = []

    def lay(running, delay=0.0):
        laid.append(Network(running.address, delay))
        return laid[-1]

    yield lay
    for way in laid:
        way.close()


def test_12_a_network_that_takes_200_ms_delays_and_loses_nothing(start, network):
    """Tokens follow each other through it at the engine's pace: none waits for the one before to be acknowledged."""
    running = start(seconds=0.005)
    with serving.Client(network(running, 0.2).address, retries=0) as client:
        assert client.health() == "SERVING"  # connected
        start_time = time.monotonic()
        streams = [client.generate([n, 2], max_tokens=60, ignore_eos=True, timeout=10) for n in range(4)]
        first = [next(stream) for stream in streams]
        until_first = time.monotonic() - start_time
        for n, stream in enumerate(streams):
            assert list(stream.result.token_ids) == solo([n, 2], 60)
        assert first
        assert 0.4 <= until_first < 1.5
        assert time.monotonic() - start_time < 3.0
        with pytest.raises(serving.ServiceError) as late:
            list(client.generate([5], max_tokens=390, ignore_eos=True, timeout=0.3))
        assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    running.books_balance()


def test_12_a_network_that_breaks_gives_a_status_and_frees_everything(start, network):
    running = start(seconds=0.005)
    way = network(running)
    with serving.Client(way.address, retries=0) as client:
        streams = [client.generate([n, 2], max_tokens=390, ignore_eos=True) for n in range(4)]
        for stream in streams:
            next(stream)
        start_time = time.monotonic()
        way.cut()
        for stream in streams:
            with pytest.raises(serving.ServiceError) as ended:
                list(stream)
            assert ended.value.code is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - start_time < 1.0
        running.books_balance()
        # The same client finds the way again.
        assert client.generate([1, 2], max_tokens=5, ignore_eos=True, timeout=10).result.usage["completion_tokens"] == 5


def test_12_a_server_that_dies_while_it_sends_a_state_leaves_nothing(start, network):
    """Half a state is none: the one that receives it stores nothing and computes the prompt itself."""
    here, there = start(), start()
    prompt = [4, 8, 15, 16, 23, 42, 7]
    list(here.client.generate(prompt, max_tokens=3))
    (whole,) = here.client.export_state(prompt)
    way, sent = network(there), threading.Event()

    def halves():
        yield type(whole)(total_bytes=whole.total_bytes, data=whole.data[:100])
        sent.set()
        time.sleep(10)  # until the call has ended

    with grpc.insecure_channel(way.address) as channel:
        call = services.GenerateStub(channel).ImportState.future(halves())
        assert sent.wait(5)
        start_time = time.monotonic()
        way.cut()
        assert call.exception(5).code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - start_time < 1.0
    assert there.client.inspect(prompt).cached_tokens == 0
    result = there.client.generate(prompt, max_tokens=9, ignore_eos=True, return_token_ids=True).result
    assert (list(result.token_ids), result.usage["cached_tokens"]) == (solo(prompt, 9), 0)
    there.books_balance()


PULL_SECONDS = 0.5


def unknown(server, network):
    """Nobody has asked for this prompt."""
    return server.address, [1, 2, 3]


def refused(server, network):
    """Nobody listens there."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{reserved.getsockname()[1]}", PROMPT


def stalled(server, network):
    """The machine answers no more, as one that is stopped."""
    way = network(server)
    way.stop()
    return way.address, PROMPT


def dead(server, network):
    """The connection breaks while the pull waits."""
    way = network(server)
    way.stop()
    threading.Timer(PULL_SECONDS / 3, way.cut).start()
    return way.address, PROMPT


PROMPT = [4, 8, 15, 16, 23, 42, 7]


@pytest.mark.parametrize(
    ("fault", "codes"),
    [
        (unknown, {grpc.StatusCode.NOT_FOUND}),
        (refused, {grpc.StatusCode.UNAVAILABLE}),
        (dead, {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}),
        (stalled, {grpc.StatusCode.DEADLINE_EXCEEDED}),
    ],
)
def test_13_a_pull_ends_by_its_own_deadline(ids_only, network, fault, codes):
    """Whatever has become of the other side; the prompt is computed here instead."""
    list(ids_only.client.generate(PROMPT, max_tokens=3))
    address, prompt = fault(ids_only, network)
    with serving.Client(address, retries=0) as client:
        start_time = time.monotonic()
        with pytest.raises(serving.ServiceError) as ended:
            client.export_state(prompt, timeout=PULL_SECONDS)
        assert time.monotonic() - start_time < PULL_SECONDS + 0.1
        assert ended.value.code in codes
    result = ids_only.client.generate(prompt, max_tokens=9, ignore_eos=True, return_token_ids=True).result
    assert list(result.token_ids) == solo(prompt, 9)
    ids_only.books_balance()


def test_13_who_pulls_twice_or_something_else_is_told(start):
    here, there = start(), start()
    list(here.client.generate(PROMPT, max_tokens=3))
    (chunk,) = here.client.export_state(PROMPT)
    again = here.client.export_state(PROMPT)
    assert there.client.import_state([chunk]) == there.client.import_state(again) == 6
    assert there.client.stats()["entries"] == 1
    with pytest.raises(serving.ServiceError) as foreign:
        there.client.import_state([type(chunk)(total_bytes=chunk.total_bytes, data=b"?" + chunk.data[1:])])
    assert foreign.value.code is grpc.StatusCode.FAILED_PRECONDITION
    there.books_balance()


def test_12_a_network_that_stands_still_is_noticed_by_pings(start, network):
    running = start(seconds=0.005, keepalive_seconds=0.3, keepalive_timeout_seconds=0.3)
    way = network(running)
    with serving.Client(way.address, retries=0) as client:
        stream = client.generate([1, 2], max_tokens=390, ignore_eos=True)
        next(stream)
        way.stop()
        start_time = time.monotonic()
        while len(running.service.jobs):
            assert time.monotonic() - start_time < 10.0
            time.sleep(0.01)
        running.books_balance()


def test_12_a_clock_that_jumps_changes_nothing(start, monkeypatch):
    """Deadlines, the watch over the engine and the answers go by a clock that nobody sets."""
    running = start(seconds=0.005, stall_seconds=1.0)
    real = time.time
    streams = [running.client.generate([n, 2], max_tokens=100, ignore_eos=True, timeout=30) for n in range(3)]
    for stream in streams:
        next(stream)
    for jump in (86_400.0, -86_400.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
        time.sleep(0.3)
        assert health(running) == health(running, "liveness") == "SERVING"
    for n, stream in enumerate(streams):
        assert list(stream.result.token_ids) == solo([n, 2], 100)
    running.books_balance()


@pytest.fixture
def copy(tmp_path):
    """Nano, to be damaged."""
    return shutil.copytree(nano(), tmp_path / "nano")


@pytest.mark.parametrize("damage", ["header", "cut off"])
def test_14_a_damaged_shard_is_named_before_anything_is_served(copy, damage, capsys, monkeypatch):
    from serving.service import program, request_log

    for name in ("handlers", "level", "propagate"):
        monkeypatch.setattr(request_log.LOGGER, name, getattr(request_log.LOGGER, name))
    shard = copy / "model.safetensors"
    content = bytearray(shard.read_bytes())
    content[9] ^= 1
    shard.write_bytes(content if damage == "header" else shard.read_bytes()[:-1])
    assert program.main(["--checkpoint", str(copy), "--port", "0", "--log-level", "error"]) == 1
    out, err = capsys.readouterr()
    assert "ready" not in out
    assert "model.safetensors" in err


@contextlib.contextmanager
def full_disk(bytes_):
    """No file may grow beyond so many bytes: writes fail as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", ["export", "save"])
def test_14_a_full_disk_leaves_the_old_checkpoint_and_half_of_none(tmp_path, name, loaded_nano):
    config, tree = loaded_nano
    write = getattr(checkpoints, name)
    with full_disk(1 << 20), pytest.raises(checkpoints.CheckpointError, match="cannot be written"):
        write(tmp_path / "new", config, tree)
    assert not (tmp_path / "new").exists()
    checkpoints.check(nano())


@pytest.fixture(scope="module")
def loaded_nano():
    return checkpoints.load(nano())
