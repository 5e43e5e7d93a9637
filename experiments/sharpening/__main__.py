"""The command of this experiment; see the package."""

import torch

from experiments.shared import chosen_names
from experiments.sharpening.dials import dials
from experiments.sharpening.instability import instability
from experiments.sharpening.principles import principles
from experiments.sharpening.regimes import fixed_length, regimes

PARTS = {part.__name__: part for part in (regimes, fixed_length, instability, dials, principles)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in chosen_names("sharpening", PARTS):
        PARTS[name]()
