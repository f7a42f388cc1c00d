"""The whole update of one flat array on virtual CPU devices, against its floor and its rivals.

python benchmarks/step.py [--density 0.001] [--workers 4] [--repeats 15] [--json FILE]
"""

from updates import run

if __name__ == "__main__":
    run(__doc__, {"flat": lambda: [(6_400_000,)]})
