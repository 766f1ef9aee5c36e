"""Tiles of every form that kernels of context parallel compute, on a CPU and on a GPU."""

from hexad.parallel.context.rounds import Tile

TILES = {
    "all": Tile((3, 20), (5, 16), False),
    "causal": Tile((2, 15), (2, 15), True),
    "blocks": Tile((0, 4, 5, 16), (0, 4, 5, 16), True),
    "limited": Tile((3, 14), (5, 16), False, -4),
    "causal and limited": Tile((2, 15), (2, 15), True, -3),
    "one query": Tile((0, 1), (0, 9), False),
    "blocks of one query": Tile((0, 1, 2), (0, 1, 2), True),
    "bands": Tile((3, 90), (3, 90), True, -5),
    "late": Tile((0, 6), (0, 9), False, 2),
}
