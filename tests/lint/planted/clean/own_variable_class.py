from dataclasses import dataclass


@dataclass
class Variable:
    name: str
    volatile: bool = False


def make(names):
    return [Variable(name, volatile=name.startswith("tmp")) for name in names]


print(make(["x", "tmp_y"]))
