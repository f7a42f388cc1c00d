"""Everything about speed in one go: selection, the update of a flat array, and of two trees, as figures and as a picture.

python benchmarks/speed.py [--directory speed]
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).parent
RUNS = {
    "step": ["step.py"],
    "tree resnet50": ["tree.py", "--tree", "resnet50"],
    "tree transformer": ["tree.py", "--tree", "transformer"],
}


def draw(measured: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """Each way to update as a bar, in units of the floor, on a scale of powers."""
    figure = Figure(figsize=(8, 2 + 1.6 * len(measured)), layout="constrained")
    for axes, (name, rows) in zip(figure.subplots(len(measured), sharex=True, squeeze=False)[:, 0], measured.items(), strict=True):
        bars = axes.barh(list(rows), [row["floors"] for row in rows.values()], color="#0072B2")
        axes.bar_label(bars, [f" {row['floors']:.2f}" for row in rows.values()])
        axes.set(title=name, xscale="log")
        axes.invert_yaxis()
        axes.margins(x=0.2)
    axes.set_xlabel("time in units of the floor: e + g in place, and an update of zeros")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path("speed"), help="for the figures and the picture; made if there is none")
    directory = parser.parse_args().directory
    directory.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, HERE / "selection.py", "--json", directory / "selection.json"], check=True)
    measured = {}
    for name, (script, *arguments) in RUNS.items():
        file = directory / f"{name.replace(' ', '_')}.json"
        subprocess.run([sys.executable, HERE / script, *arguments, "--json", file], check=True)  # each in a process of its own
        measured[name] = json.loads(file.read_text())["measured"]
    draw(measured, directory / "speed.png")


if __name__ == "__main__":
    main()
