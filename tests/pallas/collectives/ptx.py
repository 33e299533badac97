"""A machine that runs the few PTX instructions of the one-shot sum, with memory that keeps no order it need not keep.

Threads of all devices take steps in random order. A store reaches memory word by word, at any time until its kernel
ends if it stays on its device and at any time at all if it leaves it; words stored to one address by one thread keep
their order. A device begins a kernel when its previous one has ended. Memory that was not given is an error.
"""

import random
import re
import struct
from collections import defaultdict

GIGA = 1 << 32
"""Device d has the addresses from GIGA * (d + 1) on."""


def as_float(word):
    return struct.unpack("<f", struct.pack("<I", word & 0xFFFFFFFF))[0]


def as_word(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


def add_f32(a, b):
    """float32 addition: the double-precision sum of two floats rounds to the same float."""
    total = as_float(a) + as_float(b)
    return 0x7FFFFFFF if total != total else as_word(total)


def to_bf16(word):
    if word & 0x7FFFFFFF > 0x7F800000:
        return 0x7FFF
    return (word + 0x7FFF + ((word >> 16) & 1)) >> 16


INTEGER = {
    "mov": lambda a, b: a,
    "cvt": lambda a, b: a,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "div": lambda a, b: a // b,
    "rem": lambda a, b: a % b,
}


def parse(text):
    """Instructions and the places of labels; operands by name, vectors as lists."""
    code, labels = [], {}
    text = re.sub(r"\.reg[^;]*;", "", text.replace("${:uid}", "0").strip().removeprefix("{").removesuffix("}"))
    for part in re.split(r";|(?<=_0):", text):
        part = part.strip()
        if re.fullmatch(r"\w+_0", part):
            labels[part] = len(code)
        elif part:
            guard, name, rest = re.fullmatch(r"(?:@(\w+) )?([\w.]+)\s*(.*)", part).groups()
            operands = [item.strip() for item in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", rest) if item.strip()]
            code.append((guard, name.split("."), operands))
    return code, labels


class Machine:
    """All devices' memory and what is on its way to it."""

    def __init__(self, seed):
        self.random, self.memory, self.pending = random.Random(seed), {}, []

    def give(self, address, words):
        self.memory.update((address + 4 * index, word) for index, word in enumerate(words))

    def take(self, address, count):
        return [self.memory[address + 4 * index] for index in range(count)]

    def load(self, thread, address):
        own = [word for owner, place, word in self.pending if owner is thread and place == address]
        return own[-1] if own else self.memory[address]

    def store(self, thread, address, word):
        assert address in self.memory, f"a store to {address:#x}, which belongs to nobody"
        self.pending.append((thread, address, word))

    def deliver(self, index):
        owner, address, _ = self.pending[index]
        first = next(i for i, entry in enumerate(self.pending) if entry[0] is owner and entry[1] == address)
        self.memory[address] = self.pending.pop(first)[2]

    def flush(self, device):
        """The end of a device's kernel: what it stored in its own memory is there."""
        while own := [i for i, (t, a, _) in enumerate(self.pending) if t.device == device and a // GIGA == device + 1]:
            self.deliver(own[0])


class Thread:
    """One thread, which runs until `done`, an instruction a step."""

    def __init__(self, machine, code, labels, device, block, index, addresses):
        self.machine, self.code, self.labels, self.device = machine, code, labels, device
        self.registers = {"%tid.x": index, "%ctaid.x": block} | {f"${i}": a for i, a in enumerate(addresses)}
        self.at, self.done = 0, False

    def value(self, name):
        if re.fullmatch(r"\d+|0x[0-9a-f]+", name):
            return int(name, 0)
        return self.registers[name]

    def address(self, operand):
        base, _, offset = operand.strip("[]").partition("+")
        return self.registers[base] + int(offset or 0)

    def step(self):
        if self.at >= len(self.code):
            self.done = True
            return
        guard, name, operands = self.code[self.at]
        self.at += 1
        if guard is None or self.registers[guard]:
            self.run(name, operands)

    def run(self, name, operands):
        kind, bits = name[0], 64 if name[-1] in ("s64", "b64", "u64") or "wide" in name else 32
        if kind == "bra":
            self.at = self.labels[operands[0]]
        elif kind == "trap":
            raise AssertionError("a thread gave up waiting")
        elif kind == "ld":
            self.load(self.address(operands[1]), operands[0].strip("{}").split(","), bits // 32)
        elif kind == "st":
            for index, item in enumerate(operands[1].strip("{}").split(",")):
                self.machine.store(self, self.address(operands[0]) + 4 * index, self.value(item.strip()))
        else:
            values = [self.value(item) for item in operands[1:]]
            self.registers[operands[0]] = self.result(kind, name, *values) & ((1 << bits) - 1)

    def load(self, address, targets, words):
        for index, target in enumerate(targets):
            parts = [self.machine.load(self, address + 4 * (words * index + part)) for part in range(words)]
            self.registers[target.strip()] = sum(word << (32 * part) for part, word in enumerate(parts))

    def result(self, kind, name, a, b=0, c=0):
        if name[-1] == "f32" and kind == "add":
            return add_f32(a, b)
        if name[:3] == ["cvt", "rn", "bf16x2"]:
            return to_bf16(a) << 16 | to_bf16(b)
        if kind == "setp":
            outcome = {"eq": a == b, "ge": a >= b, "gt": a > b, "le": a <= b}[name[1]]
            return {"or": outcome or bool(c), "and": outcome and bool(c)}.get(name[2], outcome)
        if kind == "selp":
            return a if c else b
        if kind in ("mul", "mad"):
            return a * b + c
        return INTEGER[kind](a, b)


def run(machine, kernels):
    """Runs every device's list of kernels; a kernel is a list of `Thread`s.

    Now and then it is drawn anew how fast each device goes and how fast stores arrive, which may be hardly at all.
    """
    draw, waiting, running = machine.random, [list(queue) for queue in kernels], defaultdict(list)
    while any(waiting) or any(running.values()):
        pace, arrivals = [draw.choice((0.003, 0.1, 1)) for _ in kernels], draw.choice((0.02, 0.5, 8))
        for _ in range(draw.randint(20, 300)):
            for device, queue in enumerate(waiting):
                if not running[device] and queue and draw.random() < pace[device]:
                    running[device] = queue.pop(0)
                if running[device] and draw.random() < pace[device]:
                    advance(machine, running[device])
            for _ in range(int(arrivals + draw.random())):
                if machine.pending:
                    machine.deliver(draw.randrange(len(machine.pending)))
    while machine.pending:
        machine.deliver(0)


def advance(machine, threads):
    """Lets one thread of a device's kernel take a few steps; at the end of the last one the kernel ends."""
    thread = machine.random.choice(threads)
    for _ in range(machine.random.randint(1, 12)):
        thread.step()
    if thread.done:
        threads.remove(thread)
        if not threads:
            machine.flush(thread.device)
