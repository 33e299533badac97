"""The process: its ready line, its signals, its exit codes (checklist 4, 6 and 7)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest

import serving
from tests.serving.fake_runner import solo

ROOT = Path(__file__).resolve().parents[3]


class Process:
    """A server of its own; its address is on its first line."""

    def __init__(self, module, *flags):
        command = [sys.executable, "-m", module, "--port", "0", *flags]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._client = None

    @property
    def client(self):
        if self._client is None:
            line = self.process.stdout.readline()
            assert line.startswith("ready 127.0.0.1:"), self.process.communicate()[1]
            self._client = serving.Client(line.split()[1], retries=0)
        return self._client

    def signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def end(self, seconds=20):
        self.process.wait(seconds)
        self._client.close()
        return self.process.returncode, self.process.communicate()[1]

    def kill(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def fakes():
    """Started together, so that they import side by side."""
    flags = {"drained": (), "hurried": (), "killed": (), "crashed": (), "stalled": ("--stall-seconds", "1.5")}
    module = "tests.serving.service.fake_server"
    processes = {name: Process(module, "--max-num-seqs", "8", *more) for name, more in flags.items()}
    yield processes
    for process in processes.values():
        process.kill()


def test_sigterm_lets_fifty_streams_end_and_exits_with_0(fakes):
    server = fakes["drained"]
    streams = [server.client.generate([n % 40, 2], max_tokens=30, ignore_eos=True) for n in range(50)]
    next(streams[0])
    while server.client.stats()["requests"] < 50:
        time.sleep(0.01)
    server.signal()
    for n, stream in enumerate(streams):
        assert list(stream.result.token_ids) == solo([n % 40, 2], 30)
    assert server.end()[0] == 0


def test_a_second_sigterm_gives_statuses_and_exits_with_1(fakes):
    server = fakes["hurried"]
    streams = [server.client.generate([n, 15], max_tokens=390, ignore_eos=True) for n in range(10)]
    while server.client.stats()["running"] < 8:
        time.sleep(0.01)
    server.signal()
    time.sleep(0.1)
    server.signal()
    for stream in streams:
        with pytest.raises(serving.ServiceError, match="shutting down") as ended:
            list(stream)
        assert ended.value.code is grpc.StatusCode.UNAVAILABLE
    assert server.end()[0] == 1


def test_12_a_killed_process_gives_every_client_a_status_at_once(fakes):
    """Those with tokens, those in the queue: nobody takes what came for all, and nobody waits."""
    server = fakes["killed"]
    streams = [server.client.generate([n, 15], max_tokens=390, ignore_eos=True) for n in range(20)]
    while server.client.stats()["running"] < 8:
        time.sleep(0.01)
    start = time.monotonic()
    server.signal(signal.SIGKILL)
    for stream in streams:
        with pytest.raises(serving.ServiceError) as ended:
            list(stream)
        assert ended.value.code is grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - start < 1
    assert server.end()[0] == -signal.SIGKILL


@pytest.mark.parametrize(
    ("name", "trouble", "code", "log"),
    [("crashed", 13, 70, "the device is on fire"), ("stalled", 14, 75, "time.sleep|dispatch")],
)
def test_an_engine_that_fails_ends_the_process(fakes, name, trouble, code, log):
    import re

    server = fakes[name]
    streams = [server.client.generate([n, 2], max_tokens=390, ignore_eos=True) for n in range(3)]
    next(streams[0])
    streams.append(server.client.generate([trouble], request_id="trouble"))
    for stream in streams:
        with pytest.raises(serving.ServiceError, match=r"crashed|no sign of life") as ended:
            list(stream)
        assert ended.value.code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
    exit_code, text = server.end()
    assert exit_code == code
    assert re.search(log, text)


def niceness(pid):
    """Of each thread of a process, by name."""
    found = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found.setdefault((thread / "comm").read_text().strip(), set()).add(
            os.getpriority(os.PRIO_PROCESS, int(thread.name))
        )
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_threads_that_compute_give_way_to_those_that_answer():
    """In a process of its own, since nobody may take it back; the real one's are looked at in a slow test."""
    code = """if True:
        import sys, threading
        from pathlib import Path
        from serving.service import threads
        named = threading.Event()
        def compute():
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("tf_XLAEigen")
            named.set()
            sys.stdin.read()
        threading.Thread(target=compute).start()
        named.wait()
        print(threads.put_answers_first(), flush=True)
    """
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with process:
        assert process.stdout.readline() == b"1\n"
        found = niceness(process.pid)
        process.stdin.close()
    assert found.pop("tf_XLAEigen") == {min(own + 5, 19)}
    assert set().union(*found.values()) == {own}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tls-key", "missing.pem"], "go together"),
        (["--drain-seconds", "0"], "--drain-seconds is 0, expected more than 0"),
        (["--cache-gib", "-1"], "--cache-gib is -1, expected more than 0"),
        (["--metrics-port", "70000"], "--metrics-port is 70000, expected 0 to 65535"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["--checkpoint", "nowhere"], "does not exist"),
        (["--draft", "nowhere"], "does not exist"),
        (["--eviction", "lfu"], "--eviction is 'lfu'"),
        (["--eviction", "flop=x"], "--eviction is 'flop=x', expected lru, flop or flop=ALPHA"),
        (["--retention", "all"], "'all' is not one of"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(flags, message, capsys, monkeypatch):
    from serving.service import program, request_log

    # The program sends the log to this test's standard error, which later tests do not have.
    log = request_log.LOGGER
    for name, value in {"handlers": log.handlers[:], "level": log.level, "propagate": log.propagate}.items():
        monkeypatch.setattr(log, name, value)
    assert program.main(flags) == 2
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1


@pytest.fixture(scope="module")
def tiny_checkpoint(tiny_config, tmp_path_factory):
    """Random weights, without a tokenizer."""
    import dataclasses

    from checkpoints import synthetic

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    config = dataclasses.replace(tiny_config, num_layers=2, mla_layers=(1,), attn_res_block_size=2)
    synthetic.write_random(folder, config)
    return folder


@pytest.mark.slow
def test_12_after_a_kill_the_next_process_is_ready_and_says_the_same(tiny_checkpoint, capsys):
    """What was compiled is in JAX's cache on disk if there is one; the time to ready is printed."""
    flags = ["--checkpoint", str(tiny_checkpoint), "--dtype", "float32", "--max-num-seqs", "2", "--max-length", "96"]
    said = []
    for life in range(2):
        start = time.monotonic()
        server = Process("serving", *flags)
        try:
            stream = server.client.generate([1, 2, 3], max_tokens=60, temperature=0, ignore_eos=True)
            with capsys.disabled():
                print(f"\nlife {life}: ready after {time.monotonic() - start:.1f} s")
            if life:
                said.append(list(stream.result.token_ids))
            else:
                said.append(list(next(stream).token_ids))
                server.signal(signal.SIGKILL)
                with pytest.raises(serving.ServiceError) as ended:
                    list(stream)
                assert ended.value.code is grpc.StatusCode.UNAVAILABLE
        finally:
            server.kill()
    assert said[0]
    assert said[1][: len(said[0])] == said[0]


@pytest.mark.slow
def test_a_checkpoint_without_a_tokenizer_serves_ids(tiny_checkpoint):
    """The program as users start it: a real model, compiled before the ready line."""
    sizes = {"max-num-seqs": 2, "max-prefill-tokens": 16, "max-length": 96, "page-size": 8, "prefix-match-unit": 4}
    flags = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    server = Process("serving", "--checkpoint", str(tiny_checkpoint), "--dtype", "float32", *flags)
    try:
        prompt = list(range(20))
        results = [server.client.generate(prompt, max_tokens=6, temperature=0, logprobs=2).result for _ in range(2)]
        assert results[0].token_ids == results[1].token_ids
        assert results[1].usage["cached_tokens"] == 16
        assert len(results[0].logprobs[0].alternatives) == 2
        if sys.platform == "linux":
            assert niceness(server.process.pid)["tf_XLAEigen"] == {min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)}
        with pytest.raises(serving.ServiceError, match="no tokenizer"):
            list(server.client.generate("text"))
        assert server.client.stats()["compilations"] == 0
        chunks = server.client.export_state(prompt)
        server.client.flush()
        assert server.client.import_state(chunks) == 16
        again = server.client.generate(prompt, max_tokens=6, temperature=0).result
        assert (again.token_ids, again.usage["cached_tokens"]) == (results[0].token_ids, 16)
        server.signal()
        assert server.end()[0] == 0
    finally:
        server.kill()
