"""The least arithmetic that a step needs, written out as matrix products, and how fast this machine does such products.

Every prompt is read once for its G completions, when sampling and when learning; nothing is computed twice; a backward
pass is two products for each of the forward one (the gradient of its input and of its weight). Norms, softmaxes,
activations, the optimiser and all of Python count as nothing: a floor, not a target.
"""

from collections import Counter
from typing import NamedTuple

import torch

from benchmarks.timing import clock
from benchmarks.workload import Work


class Product(NamedTuple):
    """`batch` matrix products (rows, inner) x (inner, columns)."""

    batch: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> int:
        """A multiplication and an addition for each of the terms.

        >>> Product(1, 2, 3, 4).flops
        48
        """
        return 2 * self.batch * self.rows * self.inner * self.columns


class Net(NamedTuple):
    """A policy's size. Per layer minirlvr.py has qkv (D, 3D), out (D, D), gate and up (D, 2E), down (E, D)."""

    layers: int
    width: int  # D
    heads: int
    vocabulary: int = 16

    @property
    def hidden(self) -> int:
        """E, the width inside the MLP."""
        return self.width * 11 // 4

    @property
    def parameters(self) -> int:
        """Weights of the layers, with two norms each; then embedding, head and the last norm.

        >>> Net(layers=2, width=64, heads=4).parameters
        102720
        """
        layer = 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * layer + (2 * self.vocabulary + 1) * self.width


def read(net: Net, tokens: int) -> Counter:
    """Product -> how often, for the linear layers of one forward pass over `tokens` tokens (head apart)."""
    D, E = net.width, net.hidden
    return Counter({Product(1, tokens, i, o): net.layers for i, o in ((D, 3 * D), (D, D), (D, 2 * E), (E, D))})


def attend(net: Net, work: Work, tokens: int, keys: int) -> Counter:
    """Attention of `tokens` tokens of every prompt's tree to `keys` keys each: scores, then the mixing of values."""
    batch, size = work.prompts * net.heads, net.width // net.heads
    return Counter({Product(batch, tokens, size, keys): net.layers, Product(batch, tokens, keys, size): net.layers})


def attend_all(net: Net, work: Work, branches: int) -> Counter:
    """Attention over prompts (a token sees half the prompt) and over `branches` completions of each, token by token."""
    products = attend(net, work, work.prompt_tokens, max(work.prompt_tokens // 2, 1))
    for t in range(1, work.new_tokens):
        products += attend(net, work, branches, work.prompt_tokens + t)
    return products


def head(net: Net, tokens: int) -> Counter:
    return Counter({Product(1, tokens, net.width, net.vocabulary): 1})


def rollout_products(net: Net, work: Work) -> Counter:
    """Read each prompt once; then each of T - 1 tokens of N = Q G completions (the last is drawn and never read)."""
    N, Q = work.prompts * work.group_size, work.prompts
    products = read(net, Q * work.prompt_tokens) + head(net, Q) + attend_all(net, work, work.group_size)
    for _ in range(work.new_tokens - 1):
        products += read(net, N) + head(net, N)
    return products


def learn_products(net: Net, work: Work, branches: int) -> Counter:
    """One pass over prompts and `branches` completions of each, forward and backward."""
    Q, read_again = work.prompts, work.prompts * branches * (work.new_tokens - 1)
    forward = read(net, Q * work.prompt_tokens + read_again) + head(net, Q + read_again)
    forward += attend_all(net, work, branches)
    both = Counter(forward)
    for (batch, rows, inner, columns), count in forward.items():
        both[Product(batch, rows, columns, inner)] += count  # gradient of the input
        both[Product(batch, inner, rows, columns)] += count  # gradient of the weight
    return both


def step_products(work: Work, dlc: bool = False) -> Counter:
    """All products of one step. The memory (one layer) reads what the policy reads and learns the correct half."""
    policy = Net(work.layers, work.width, work.heads)
    products = rollout_products(policy, work) + learn_products(policy, work, work.group_size)
    if dlc:
        memory = Net(1, work.memory_width, work.heads)
        products += rollout_products(memory, work) + learn_products(memory, work, work.group_size // 2)
    return products


def flops(products: Counter) -> int:
    """Floating-point operations of all products.

    >>> flops(Counter({Product(1, 2, 3, 4): 10}))
    480
    """
    return sum(product.flops * count for product, count in products.items())


class Speeds:
    """The shortest time seen for each product: call `measure` again and again, between whatever else is timed."""

    def __init__(self, products: set[Product], device: str = "cpu", side: int = 1024):
        self.device, self.square = device, Product(1, side, side, side)
        self.best = dict.fromkeys({self.square, *products}, float("inf"))

    def measure(self, repeats: int = 3) -> None:
        """Time every product once more; each time is of `repeats` in a row."""
        for product in self.best:
            batch, rows, inner, columns = product
            shapes = (batch, rows, inner), (batch, inner, columns)
            a, b = (torch.rand(shape, device=self.device).squeeze(0) for shape in shapes)
            torch.matmul(a, b)
            began = clock(self.device)
            for _ in range(repeats):
                torch.matmul(a, b)
            self.best[product] = min(self.best[product], (clock(self.device) - began) / repeats)

    @property
    def rate(self) -> float:
        """FLOP a second in the product of two large square matrices: the machine's own."""
        return self.square.flops / self.best[self.square]

    def floors(self, products: Counter) -> tuple[float, float]:
        """Seconds for all products: at the machine's rate, and with each product as fast as it was alone."""
        own = sum(self.best[product] * count for product, count in products.items())
        return flops(products) / self.rate, own
