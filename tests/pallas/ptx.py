"""Runs a warp of PTX on the CPU, as far as the kernels' inline programs need it: what no interpreter of Pallas sees.

All lanes take the same branches. A register is 64 bits of each lane, whatever its type; numbers are read from them.
"""

import re

import numpy as np

LANES = np.arange(32)


class Memory:
    """Arrays at addresses of their own."""

    def __init__(self):
        self.arrays = []

    def place(self, array):
        """The address of an array, of which loads and stores see the bytes."""
        self.arrays.append(array.reshape(-1).view(np.uint8))
        return len(self.arrays) << 40

    def words(self, address, count, size):
        array, first = self.arrays[(address >> 40) - 1], address & (1 << 40) - 1
        assert 0 <= first <= array.size - count * size, f"{count} x {size} bytes at {first} of {array.size}"
        return array[first : first + count * size].view(f"u{size}")


def as_float(bits):
    return bits.astype(np.uint32).view(np.float32)


def as_bits(value):
    return np.asarray(value, np.float32).view(np.uint32).astype(np.uint64)


def as_int(bits):
    return bits.astype(np.uint32).view(np.int32)


def bfloat16(bits):
    """The upper 16 bits of float32, rounded to nearest even."""
    return (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)


FLOATS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "max": np.maximum,
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
    "ex2": np.exp2,
    "rcp": lambda a: np.float32(1) / a,
}
INTEGERS = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "mad": lambda a, b, c: a * b + c,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "div": lambda a, b: a // b,
    "rem": lambda a, b: a % b,
    "cvt": lambda a: a,
    "mov": lambda a: a,
}
COMPARE = {"eq": np.equal, "lt": np.less, "ge": np.greater_equal}


class Warp:
    """Registers of a warp, and what it executes."""

    def __init__(self, memory, operands, first_thread=0):
        self.memory, self.operands = memory, operands
        self.registers = {"%tid.x": (LANES + first_thread).astype(np.uint64)}

    def value(self, name):
        if name in self.registers:
            return self.registers[name]
        if name.startswith("$"):
            return np.full(32, self.operands[int(name[1:])], np.uint64)
        bits = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full(32, bits, np.uint64)

    def run(self, text):
        """Executes a program from its beginning to its end."""
        text = re.sub(r"\.reg [^;]*;", "", text)
        steps, labels = [], {}
        for piece in text.split(";"):
            vector = ".v" in piece or "{l" in piece
            part = piece.strip() if vector else piece.strip(" {}\n")
            while match := re.match(r"\s*(\w+):\s*", part):
                labels[match[1]], part = len(steps), part[match.end() :]
            if part:
                steps.append(part)
        at = 0
        while at < len(steps):
            at = self.step(steps[at], at, labels)

    def step(self, text, at, labels):
        guard, live = re.match(r"@(\w+)\s+", text), np.ones(32, bool)
        if guard:
            live, text = self.registers[guard[1]], text[guard.end() :]
        name, _, rest = text.partition(" ")
        kind, *flags = name.split(".")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        if kind == "bra":
            assert live.all() or not live.any(), "lanes take different branches"
            return labels[operands[0]] if live.all() else at + 1
        if kind in ("bar", "barrier"):
            return at + 1
        if kind in ("ld", "st"):
            self.move(kind, flags, operands, live)
        else:
            self.write(operands[0], self.compute(kind, flags, operands[1:]), live)
        return at + 1

    def write(self, name, value, live):
        if name.startswith("{"):
            low, high = name.strip("{} ").split(", ")
            self.registers[low], self.registers[high] = value & np.uint64(0xFFFF), value >> np.uint64(16)
            return
        old = self.registers.get(name, np.zeros_like(value))
        self.registers[name] = np.where(live, value, old)

    def compute(self, kind, flags, operands):
        if kind == "shfl":
            value, other = self.value(operands[0]), self.value(operands[1]).astype(int)
            return value[LANES ^ other if "bfly" in flags else other]
        values = [self.value(name) for name in operands]
        if kind == "setp":
            left, right = (as_int(v) if "s32" in flags else v for v in values[:2])
            found = COMPARE[flags[0]](left, right)
            return found & values[2] if "and" in flags else found
        if kind == "selp":
            return np.where(values[2], values[0], values[1])
        if "bf16x2" in flags:
            return bfloat16(values[0]) << np.uint64(16) | bfloat16(values[1])
        if flags[-1] == "f32":
            return as_bits(FLOATS[kind](*map(as_float, values)))
        value = INTEGERS[kind](*values)
        wide = "wide" in flags or flags[-1] in ("u64", "b64") or flags[0] == "u64"
        return value if wide else value & np.uint64(0xFFFFFFFF)

    def move(self, kind, flags, operands, live):
        place, registers = operands if kind == "st" else operands[::-1]
        base, _, offset = place.strip("[]").partition("+")
        names = [name.strip() for name in registers.strip("{}").split(",")]
        size = int(flags[-1][1:]) // 8
        addresses = self.value(base) + np.uint64(int(offset or 0))
        for lane in np.flatnonzero(live):
            words = self.memory.words(int(addresses[lane]), len(names), size)
            for index, name in enumerate(names):
                if kind == "st":
                    words[index] = self.registers[name][lane] & np.uint64((1 << 8 * size) - 1)
                else:
                    self.registers[name][lane] = words[index]
