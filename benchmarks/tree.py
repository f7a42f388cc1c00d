"""The whole update of a tree of many leaves on virtual CPU devices, against its floor and its rivals.

python benchmarks/tree.py [--tree resnet50|transformer] [--density 0.001] [--workers 4] [--repeats 15] [--json FILE]
"""

from updates import Shapes, run


def resnet50() -> Shapes:
    """161 leaves, 25.6e6 parameters: most of the leaves are scales and biases, most of the parameters are in few."""
    shapes: list[tuple[int, ...]] = [(7, 7, 3, 64), (64,), (64,)]
    channels = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolutions = [(1, 1, channels, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            if block == 0:
                convolutions.append((1, 1, channels, 4 * width))
            for kernel in convolutions:
                shapes += [kernel, kernel[-1:], kernel[-1:]]
            channels = 4 * width
    return [*shapes, (2048, 1000), (1000,)]


def transformer() -> Shapes:
    """A small language model: 6 layers of width 256, 8192 tokens, 6.9e6 parameters."""
    width, layers, tokens = 256, 6, 8192
    layer = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,), (width,), (width,)]
    layer += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(tokens, width), *(shape for _ in range(layers) for shape in layer), (width,), (width,)]


if __name__ == "__main__":
    run(__doc__, {"resnet50": resnet50, "transformer": transformer})
