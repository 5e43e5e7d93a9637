"""Sharpening against task reward, P2's regimes beside their exact targets: `python results/sharpening.py NAME ...`.

    regimes       train each regime, and its distance to its own exact optimum; pass@k and maj@k
    fixed_length  the same with the stop token ignored in training: what is left without the bias to short answers
    instability   seeds and learning rates: fall from the peak, spread over seeds, collapse of the length
    dials         where sharpening helps: the sign of one covariance of the reference, over many references
    principles    the identity, the length's closed form, the most likely completion, alpha below 1

Each writes results/sharpening_NAME: config.json, CSV files, one figure and table.txt, all of it in minutes on one core.
"""

import copy
import csv
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from command_line import available_cores, load_reference  # noqa: E402
from minirlvr import (  # noqa: E402
    Experiment,
    Policy,
    Run,
    Sampling,
    Settings,
    Shape,
    Sharpening,
    Update,
    parse_method,
    train,
)
from toy_tasks import Scratchpad  # noqa: E402
from toy_tasks import sharpening as exact  # noqa: E402
from toy_tasks.exact import Listing, Tree, device_of  # noqa: E402
from toy_tasks.measures import interval, maj_at_k, pass_at_k_exact  # noqa: E402

BETA_INVERSE = 10.0
KS = (1, 2, 4, 8, 16)
SPLITS = {"train": "trained prompts", "heldout": "held-out prompts"}


class Goal(NamedTuple):
    """A regime with its alpha, and how it is drawn (Okabe and Ito's colours, told apart by everyone)."""

    name: str
    regime: str
    alpha: float
    colour: str


GOALS = (
    Goal("task", "task", 1.0, "#009E73"),
    Goal("tilt α=2", "tilt", 2.0, "#0072B2"),
    Goal("temper α=2", "temper", 2.0, "#E69F00"),
    Goal("temper α=4", "temper", 4.0, "#D55E00"),
    Goal("sharpen", "sharpen", 2.0, "#CC79A7"),
)
CORE = tuple(goal for goal in GOALS if goal.name != "temper α=4")
GREY = "#666666"


# --- all completions of a reference, exactly ------------------------------------------------------------------------


class FixedTree(Tree):
    """The tree in which the stop is a token like others: its cut outcomes are all texts of `max_new_tokens` tokens."""

    def _children(self, policy, level: Sequence[tuple], min_mass: float) -> list[tuple]:
        prefixes = torch.tensor([node[1:] for node, _ in level], dtype=torch.long).view(len(level), -1)
        tokens = torch.cat((self.prompt_tokens[[node[0] for node, _ in level]], prefixes), 1)
        last = policy(tokens.to(device_of(policy)))[:, -1].float().log_softmax(-1).cpu().double()
        log_mass = last + torch.tensor([mass for _, mass in level], dtype=torch.float64)[:, None]  # (rows, V)
        found = (log_mass >= math.log(min_mass)).nonzero().tolist()
        return [((*level[row][0], token), log_mass[row, token].item()) for row, token in found]


class World:
    """The completions (O,) that a reference gives at least `min_mass`, and what any policy makes of them.

    With `fixed`, completions go on after the stop to the longest length, as `--fixed-length` trains them; what is right
    and how long the answer is are still decided at the first stop.
    """

    def __init__(self, task: Scratchpad, reference: Policy, prompts: Sequence[str], min_mass: float, fixed=False):
        self.task, self.prompts, self.min_mass = task, list(prompts), min_mass
        self.tree = (FixedTree if fixed else Tree)(reference, task, prompts, min_mass)
        self.keep = ~self.tree.ended if fixed else torch.ones_like(self.tree.ended)  # (all outcomes,)
        self.owner = self.tree.owner[self.keep]  # (O,)
        texts = [text for text, keep in zip(self.tree.texts, self.keep.tolist(), strict=True) if keep]
        owners, most = self.owner.tolist(), task.max_new_tokens
        self.lengths = torch.tensor([min(len(text) + 1, most) for text in texts])  # of the answer, stop included
        self.rewards = torch.tensor(
            [len(text) < most and task.verify(self.prompts[q], text) for q, text in zip(owners, texts, strict=True)]
        )
        names = [(q, task.mode_class(text)) for q, text in zip(owners, texts, strict=True)]
        classes = {name: i for i, name in enumerate(dict.fromkeys(names))}
        self.class_of = torch.tensor([classes[name] for name in names])  # (O,) of one stated total, per prompt
        self.class_owner = torch.tensor([q for q, _ in classes])  # (classes,)
        self.class_right = torch.tensor([said == task.modes(self.prompts[q])[0] for q, said in classes])
        self.listing = Listing(task, self.prompts)
        self.reference = self.score(reference)  # (O,)
        self.reference_accuracy = self.accuracy(reference)  # (Q,) of all its completions, not of these alone
        self.left_out = (1 - exact._sum(self.reference.exp(), self.owner)).clamp(min=0)  # (Q,)

    @torch.no_grad()
    def score(self, policy: Policy) -> Tensor:
        """log-probability of every outcome: (O,)."""
        return self.tree.outcome_log_probs(policy)[self.keep]

    @torch.no_grad()
    def accuracy(self, policy: Policy) -> Tensor:
        """Exact: the summed probability of the listed modes, (Q,)."""
        return self.listing.log_probs(policy).exp().sum(-1)

    def target(self, goal: Goal) -> Tensor:
        """log of the goal's optimum over the outcomes: (O,)."""
        return exact.target_log_probs(
            goal.regime, self.reference, self.rewards, self.owner, goal.alpha, BETA_INVERSE, self.lengths
        )

    def missing(self, goal: Goal) -> float:
        """A bound on what pruning takes from the goal's optimum, mean over prompts."""
        size = self.min_mass, self.task.vocab_size, self.task.max_new_tokens
        arguments = self.reference, self.rewards, self.owner, self.left_out, *size, goal.alpha, BETA_INVERSE
        return exact.missing_share(goal.regime, *arguments).mean().item()

    def summary(self, log_probs: Tensor) -> dict[str, Tensor]:
        return exact.target_summary(log_probs, self.rewards, self.lengths, self.owner)

    def distance(self, log_probs: Tensor, accuracy: Tensor, goal: Goal, target: Tensor) -> dict[str, Tensor]:
        """KL and total variation to the goal's optimum, (Q,) each.

        temper and tilt have one optimum with a tail everywhere: KL(policy || optimum). task has many and sharpen's has
        no tail, so there it is the KL of the nearest optimum from the policy, -log of the policy's mass on what is
        best; the total variation is to the same.
        """
        if goal.regime in ("temper", "tilt"):
            kl = exact.kl(log_probs, target, self.owner)
            return {"kl": kl, "tv": exact.total_variation(log_probs, target, self.owner)}
        mass = accuracy if goal.regime == "task" else exact._sum(log_probs.exp() * (target > -math.inf), self.owner)
        return {"kl": -mass.log(), "tv": 1 - mass}

    def votes(self, log_probs: Tensor, k: int, smallest: float = 0.01) -> Tensor:
        """maj@k (Q,): the chance that the total stated most often in k answers is right, ties broken evenly.

        Wrong totals under `smallest` and what is outside the tree count as one wrong answer: a lower bound, by little.
        """
        mass = torch.zeros(len(self.class_owner)).double().index_add(0, self.class_of, log_probs.exp())
        values = []
        for q in range(len(self.prompts)):
            shares, right = mass[self.class_owner == q], self.class_right[self.class_owner == q]
            kept = right | (shares >= smallest)
            weights = [*shares[kept].tolist(), max(1 - shares[kept].sum().item(), 0.0)]
            weights = np.array(weights) / sum(weights)
            values.append(maj_at_k(weights, np.array([*right[kept].tolist(), False]), k))
        return torch.tensor(values)

    def splits(self, values: Tensor) -> dict[str, float]:
        """Means of (Q,) over the trained and over the held-out prompts."""
        trained = torch.tensor([prompt in self.task.train for prompt in self.prompts])
        return {"train": values[trained].mean().item(), "heldout": values[~trained].mean().item()}

    def rows(self, **values: Tensor) -> list[dict]:
        """One row a split."""
        means = {name: self.splits(value) for name, value in values.items()}
        return [{"split": split} | {name: mean[split] for name, mean in means.items()} for split in SPLITS]


def default_world(every: int = 2, min_mass: float = 1e-4, fixed: bool = False) -> tuple[Policy, World]:
    """The default reference, with every second (or so) trained prompt and the held-out ones."""
    task = Scratchpad()
    reference = load_reference(task, Shape())
    prompts = task.train[::every] + task.heldout[:: max(every // 2, 1)]
    return reference, World(task, reference, prompts, min_mass, fixed)


# --- training, side by side -----------------------------------------------------------------------------------------


class Job(NamedTuple):
    """One run."""

    goal: Goal
    seed: int
    learning_rate: float
    steps: int
    measured: tuple[int, ...]  # the steps at which it is measured
    prompts: int  # a step
    fixed: bool = False
    voting: bool = False

    def settings(self) -> Settings:
        return Settings(
            experiment=Experiment(task="scratchpad", steps=self.steps, evaluate_every=self.steps),
            sampling=Sampling(prompts=self.prompts, fixed_length=self.fixed),
            update=Update(learning_rate=self.learning_rate),
            sharpening=Sharpening(sharpen_alpha=self.goal.alpha, beta_inverse=BETA_INVERSE),
        )


SHARED: dict = {}  # in a worker process: the reference and its world


def start_worker(make_world: Callable, arguments: tuple) -> None:
    torch.set_num_threads(1)
    SHARED["reference"], SHARED["world"] = make_world(*arguments)


def train_one(job: Job) -> dict[str, list[dict]]:
    """Train one run: {"curve": a row a step measured and split, "votes": a row a moment, split and k}."""
    reference, world = SHARED["reference"], SHARED["world"]
    run = Run(job.settings(), parse_method(job.goal.regime), job.seed, reference, task=world.task)
    target, kept = world.target(job.goal), Kept()
    head = {"goal": job.goal.name, "learning_rate": job.learning_rate, "seed": job.seed}
    curve: list[dict] = []

    def tick() -> None:
        if run.step not in job.measured:
            return
        log_probs, accuracy = world.score(run.policy), world.accuracy(run.policy)
        summary = world.summary(log_probs)
        outside = (1 - exact._sum(log_probs.exp(), world.owner)).clamp(min=0)
        values = {"accuracy": accuracy, "length": summary["length"], "entropy": summary["entropy"]}
        values |= world.distance(log_probs, accuracy, job.goal, target) | {"outside": outside}
        rows = world.rows(**values)
        curve.extend(head | {"step": run.step} | row for row in rows)
        kept.see(rows[0]["accuracy"], run)

    tick()
    train(run, tick)
    moments = {"base": reference, "peak": kept.policy, "last": run.policy} if job.voting else {}
    votes = [head | row for moment, policy in moments.items() for row in vote_rows(world, moment, policy)]
    return {"curve": curve, "votes": votes}


class Kept:
    """The policy at the peak: where the accuracy on trained prompts was highest, so that nothing looks at others."""

    def __init__(self) -> None:
        self.best, self.policy = -1.0, None

    def see(self, accuracy: float, run: Run) -> None:
        if accuracy > self.best:
            self.best, self.policy = accuracy, copy.deepcopy(run.policy)


def vote_rows(world: World, moment: str, policy: Policy) -> list[dict]:
    """pass@k and maj@k of one policy; the reference's are counted once a process."""
    if moment == "base" and "votes" in SHARED:
        return SHARED["votes"]
    log_probs, mass = world.score(policy), world.accuracy(policy).clamp(max=1)
    rows = []
    for k in KS:
        measured = {"pass@k": torch.from_numpy(pass_at_k_exact(mass.numpy(), k)), "maj@k": world.votes(log_probs, k)}
        rows += [{"moment": moment, "k": k} | row for row in world.rows(**measured)]
    if moment == "base":
        SHARED["votes"] = rows
    return rows


def train_all(jobs: list[Job], make_world: Callable = default_world, arguments: tuple = ()) -> dict[str, list[dict]]:
    """All runs, two side by side; their order and number of processes change nothing.

    Make the world here first, so that the reference is pretrained once and not by each worker.
    """
    from tqdm import tqdm

    found: dict[str, list[dict]] = {"curve": [], "votes": []}
    context = multiprocessing.get_context("spawn")
    side_by_side = min(available_cores(), len(jobs), 2)
    with ProcessPoolExecutor(side_by_side, context, start_worker, (make_world, arguments)) as pool:
        for result in tqdm(pool.map(train_one, jobs), total=len(jobs), unit="run", mininterval=10):
            for name, rows in result.items():
                found[name] += rows
    return found


# --- tables and files -----------------------------------------------------------------------------------------------


def pick(rows: list[dict], **wanted) -> list[dict]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def spread(rows: list[dict], measure: str) -> tuple[float, float, float]:
    """Mean and 95 % interval over the rows (one a seed)."""
    return interval([row[measure] for row in rows])


def cell(values: tuple[float, float, float], digits: int = 3) -> str:
    mean, _, high = values
    return f"{mean:.{digits}f}" + (f" ±{high - mean:.{digits}f}" if high == high else "")


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need, the first one left."""
    widths = [max(len(str(row[i])) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            str(v).ljust(w) if i == 0 else str(v).rjust(w) for i, (v, w) in enumerate(zip(r, widths, strict=True))
        )
        for r in (head, *rows)
    )


def write_csv(path: Path, rows: list[dict]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)


class Folder:
    """results/sharpening_NAME, its files and its clock."""

    def __init__(self, name: str):
        self.name, self.path, self.began = name, ROOT / "results" / f"sharpening_{name}", time.time()
        self.path.mkdir(exist_ok=True)

    def csv(self, name: str, rows: list[dict]) -> None:
        write_csv(self.path / f"{name}.csv", rows)

    def close(self, text: str, **config) -> None:
        """table.txt and config.json, last."""
        (self.path / "table.txt").write_text(text.strip("\n") + "\n")
        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
        seconds = {"wall_seconds": round(time.time() - self.began), "processor_seconds": round(processor_seconds())}
        config = {"command": f"python results/sharpening.py {self.name}"} | seconds | config | {"versions": versions}
        (self.path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        print(text, f"\n{seconds}; everything is in {self.path}/")


def processor_seconds() -> float:
    """Of this process and the workers that have ended."""
    return sum(os.times()[:4])


def job_config(job: Job) -> dict:
    return {"settings": dataclasses.asdict(job.settings()), "measured_steps": job.measured}


def canvas(rows: int, columns: int, size: tuple[float, float], **options):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 12, "axes.titlesize": 13, "axes.grid": True, "grid.alpha": 0.25})
    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)


def save_figure(figure, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=100)
    plt.close(figure)


def band(axis, x: Sequence, groups: list[list[float]], colour: str, label: str, low=None, high=None, **style) -> None:
    """The mean over seeds with its 95 % interval, cut at what the measure can be."""
    values = np.array([interval(group) for group in groups])
    axis.plot(x, values[:, 0], color=colour, label=label, linewidth=2, **style)
    axis.fill_between(x, *np.clip(values[:, 1:], low, high).T, color=colour, alpha=0.18, linewidth=0)


# --- regimes and fixed_length ---------------------------------------------------------------------------------------

STEPS = 150
# Chosen once, with seeds 1 and 2, for task's held-out accuracy among 1e-4, 2e-4, 3e-4 with 16 or all 37 prompts a step;
# the default (3e-4 with 16) overfits the 37 prompts: .86 to .89 held out. What is reported has other seeds.
LEARNING_RATE, PROMPTS_A_STEP = 2e-4, 37
SEEDS = (3, 4, 5)
MEASURED = (0, 5, 10, 20, 30, 40, 60, 80, 100, 125, 150)


def regimes() -> None:
    compare(Folder("regimes"), GOALS, every=2, min_mass=1e-4, fixed=False)


def fixed_length() -> None:
    """Fewer prompts and goals: nine tokens and no stop make many more texts to sum over."""
    folder = Folder("fixed_length")
    _, world = default_world(4, 1e-4)
    text = (
        "Another way to take the length out, exact targets with the stop: l_ref divided by length (mean) or its root\n"
    )
    compare(folder, CORE, every=4, min_mass=2e-4, fixed=True, more=text + normalisations(world))


def compare(folder: Folder, goals: Sequence[Goal], every: int, min_mass: float, fixed: bool, more: str = "") -> None:
    """Train every goal with every seed and write the folder."""
    jobs = [
        Job(goal, seed, LEARNING_RATE, STEPS, MEASURED, PROMPTS_A_STEP, fixed, voting=True)
        for seed in SEEDS
        for goal in goals
    ]
    _, world = default_world(every, min_mass, fixed)
    found = train_all(jobs, default_world, (every, min_mass, fixed))
    curve, votes, targets = found["curve"], without_repeats(found["votes"]), target_rows(world)
    for name, rows in (("curves", curve), ("targets", targets), ("votes", votes)):
        folder.csv(name, rows)
    draw_regimes(folder.path / "regimes.png", goals, curve, targets, fixed)
    draw_votes(folder.path / "votes.png", goals, votes)
    notes = NOTES.format(min_mass=min_mass) + FIXED_NOTE * fixed
    text = "\n\n".join((regimes_table(goals, curve, targets), votes_table(goals, votes), more, notes))
    folder.close(text, **job_config(jobs[0]), seeds=SEEDS, tree={"min_mass": min_mass, "prompts": world.prompts})


def normalisations(world: World) -> str:
    """Accuracy and length of the exact targets where alpha's l_ref is summed, or divided by a power of the length."""
    rows = []
    for goal, normalize in itertools.product(CORE[1:], ("sum", "weighted", "mean")):
        target = exact.target_log_probs(
            goal.regime, world.reference, world.rewards, world.owner, goal.alpha, BETA_INVERSE, world.lengths, normalize
        )
        values = [row[name] for name in ("accuracy", "length") for row in world.rows(**world.summary(target))]
        rows.append((goal.name, normalize, *(f"{value:.3f}" for value in values)))
    head = ("exact target", "l_ref", *(f"{name}, {split}" for name in ("accuracy", "length") for split in SPLITS))
    return text_table(head, rows)


NOTES = """\
± is half the 95 % interval (Student's t) over seeds. TV and KL are to the regime's exact optimum over the enumerated
completions of the reference: KL(policy || optimum) for temper and tilt; for task (nearest of its optima) and sharpen
-log of the policy's mass on the optimum's completions. The target's row gives a bound on what pruning takes from it.
outside: the policy's mass on completions that the reference gives less than {min_mass:g}, at the end. Length in tokens
with the stop. maj@k votes by the stated total, so a right total after a false step counts there. peak: the measured
step with the highest accuracy on trained prompts."""
FIXED_NOTE = """
Trained without a stop: distances and entropy are those of the whole text of nine tokens, accuracy and length those of
the answer, up to the first stop."""


def without_repeats(votes: list[dict]) -> list[dict]:
    """The reference's rows once, not once a run."""
    first = pick(votes, moment="base", goal=votes[0]["goal"], seed=votes[0]["seed"])
    return [row | {"goal": "reference", "seed": ""} for row in first] + [v for v in votes if v["moment"] != "base"]


def target_rows(world: World) -> list[dict]:
    """The reference and every exact target: accuracy, length, entropy, and what pruning may have taken."""
    summary = world.summary(world.reference) | {"accuracy": world.reference_accuracy}
    rows = [{"goal": "reference"} | row | {"missing": world.left_out.mean().item()} for row in world.rows(**summary)]
    for goal in GOALS:
        for row in world.rows(**world.summary(world.target(goal))):
            rows.append({"goal": goal.name} | row | {"missing": world.missing(goal)})
    return rows


def regimes_table(goals: Sequence[Goal], curve: list[dict], targets: list[dict]) -> str:
    names = ("accuracy", "length", "entropy", "tv", "kl", "outside")
    rows = []
    for name, split in itertools.product(["reference", *(goal.name for goal in goals)], SPLITS):
        (target,) = pick(targets, goal=name, split=split)
        last = pick(curve, goal=name, split=split, step=STEPS)
        if last:
            rows.append((name, split, *(cell(spread(last, measure)) for measure in names)))
        label = "  its target" if last else name
        values = [f"{target[measure]:.3f}" for measure in names[:3]]
        rows.append((label, split, *values, "", "", f"≤ {target['missing']:.1e}"))
    return text_table(("", "split", "accuracy", "length", "entropy", "TV", "KL (nats)", "outside"), rows)


def votes_table(goals: Sequence[Goal], votes: list[dict]) -> str:
    rows = []
    cases = [("reference", "base"), *((goal.name, moment) for goal in goals for moment in ("peak", "last"))]
    for (name, moment), split in itertools.product(cases, SPLITS):
        of = pick(votes, goal=name, moment=moment, split=split)
        values = [f"{np.mean([v[m] for v in pick(of, k=k)]):.3f}" for m in ("pass@k", "maj@k") for k in KS]
        rows.append((name, moment, split, *values))
    head = [f"{measure}@{k}" for measure in ("pass", "maj") for k in KS]
    return text_table(("", "moment", "split", *head), rows)


def draw_regimes(path: Path, goals: Sequence[Goal], curve: list[dict], targets: list[dict], fixed: bool) -> None:
    """Accuracy, length and total variation against steps; dotted, each regime's exact target."""
    figure, axes = canvas(3, 2, (13, 13.5), sharex=True, sharey="row")
    what = {"accuracy": ("accuracy (probability)", 0, 1), "length": ("mean answer length (tokens, with stop)", 1, 9)}
    what["tv"] = ("total variation to own exact target", 0, 1)
    for (i, (measure, (label, low, high))), (j, (split, title)) in itertools.product(
        enumerate(what.items()), enumerate(SPLITS.items())
    ):
        axis = axes[i, j]
        for goal in goals:
            of = pick(curve, goal=goal.name, split=split)
            groups = [[row[measure] for row in pick(of, step=step)] for step in MEASURED]
            band(axis, MEASURED, groups, goal.colour, goal.name, low, high)
            if measure != "tv":
                (target,) = pick(targets, goal=goal.name, split=split)
                axis.axhline(target[measure], color=goal.colour, linestyle=":", linewidth=1.3)
        if measure != "tv":
            (base,) = pick(targets, goal="reference", split=split)
            axis.axhline(base[measure], color=GREY, linestyle="--", linewidth=1.3, label="reference")
        axis.set(ylim=(low if i != 1 else 2.5, high + (0.03 if i != 1 else 0)), title=title if i == 0 else None)
        axis.set(ylabel=label if j == 0 else None, xlabel="training step" if i == 2 else None)
    where = "fixed length: the stop is ignored in training" if fixed else "completions end at the stop"
    figure.suptitle(f"Four regimes from one reference ({where})", fontsize=15)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    handles.append(axes[0, 0].plot([], [], color="black", linestyle=":")[0])
    caption = [*labels, "exact target, in the regime's colour"]
    figure.legend(handles, caption, loc="outside lower center", ncols=4, frameon=False)
    save_figure(figure, path)


def draw_votes(path: Path, goals: Sequence[Goal], votes: list[dict]) -> None:
    """pass@k and maj@k at the end of training, beside the reference."""
    figure, axes = canvas(2, 2, (12, 9), sharex=True, sharey=True)
    for (i, measure), (j, (split, title)) in itertools.product(
        enumerate(("pass@k", "maj@k")), enumerate(SPLITS.items())
    ):
        axis = axes[i, j]
        for goal in goals:
            of = pick(votes, goal=goal.name, moment="last", split=split)
            groups = [[row[measure] for row in pick(of, k=k)] for k in KS]
            band(axis, KS, groups, goal.colour, goal.name, 0, 1, marker="o", markersize=4)
        base = [pick(votes, goal="reference", split=split, k=k)[0][measure] for k in KS]
        axis.plot(KS, base, "--", color=GREY, marker="s", markersize=4, label="reference")
        axis.axhline(1, color="black", linewidth=0.6)
        axis.set_xscale("log", base=2)
        axis.set_xticks(KS, KS)
        axis.set(ylim=(0, 1.03), title=title if i == 0 else None)
        axis.set(ylabel=f"{measure} (probability)" if j == 0 else None, xlabel="answers k" if i == 1 else None)
    figure.suptitle(f"Right at least once, and by vote over the stated total, after {STEPS} steps", fontsize=15)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    save_figure(figure, path)


# --- instability ----------------------------------------------------------------------------------------------------

RATES = (1e-4, 3e-4, 1e-3, 3e-3)
UNSTABLE_STEPS, UNSTABLE_SEEDS = 100, 3
UNSTABLE_MEASURED = (0, 10, 20, 30, 40, 60, 80, 100)
SHORT = 4.0  # tokens; a mean length below it counts as collapsed: the direct answer has 3, the steps 8


def instability() -> None:
    folder = Folder("instability")
    jobs = [
        Job(goal, seed, rate, UNSTABLE_STEPS, UNSTABLE_MEASURED, prompts=16)
        for seed, rate, goal in itertools.product(range(UNSTABLE_SEEDS), RATES, CORE)
    ]
    arguments = (4, 3e-4)
    _, world = default_world(*arguments)
    curve = train_all(jobs, default_world, arguments)["curve"]
    targets, runs = target_rows(world), [one for job in jobs for one in run_rows(curve, job)]
    folder.csv("curves", curve)
    folder.csv("runs", runs)
    draw_instability(folder.path / "instability.png", curve, runs, targets)
    folder.close(
        instability_table(runs, targets) + "\n\n" + UNSTABLE_NOTES,
        **job_config(jobs[0]),
        learning_rates=RATES,
        seeds=UNSTABLE_SEEDS,
        tree={"min_mass": arguments[1], "prompts": world.prompts},
    )


UNSTABLE_NOTES = """\
peak is the highest accuracy of the measured steps, step 0 (the reference) included; fall = peak - last. ± is half the
95 % interval over seeds; sd is the standard deviation of the last accuracy over seeds. closest: the smallest total
variation to the regime's exact target along training. short: share of runs that end with a mean length below 4 tokens;
sharpen's own target is there, temper's and tilt's are not."""


def run_rows(curve: list[dict], job: Job) -> list[dict]:
    """One row a run and split: peak, last, fall, distances, length."""
    rows = []
    for split in SPLITS:
        of = pick(curve, goal=job.goal.name, seed=job.seed, learning_rate=job.learning_rate, split=split)
        peak, last = max(row["accuracy"] for row in of), of[-1]
        row = {"goal": job.goal.name, "learning_rate": job.learning_rate, "seed": job.seed, "split": split}
        row |= {"peak": peak, "last": last["accuracy"], "fall": peak - last["accuracy"], "length": last["length"]}
        rows.append(row | {"tv": last["tv"], "closest": min(row["tv"] for row in of), "kl": last["kl"]})
    return rows


def instability_table(runs: list[dict], targets: list[dict]) -> str:
    rows = []
    for goal, split, rate in itertools.product(CORE, SPLITS, RATES):
        of = pick(runs, goal=goal.name, split=split, learning_rate=rate)
        (target,) = pick(targets, goal=goal.name, split=split)
        values = [cell(spread(of, measure)) for measure in ("peak", "last", "fall")]
        values.append(f"{np.std([row['last'] for row in of], ddof=1):.3f}")
        values += [cell(spread(of, "closest")), cell(spread(of, "tv")), cell(spread(of, "length"), 2)]
        short = np.mean([row["length"] < SHORT for row in of])
        rows.append((goal.name, split, f"{rate:g}", *values, f"{target['length']:.2f}", f"{short:.2f}"))
    head = ("", "split", "rate", "peak", "last", "fall", "sd", "closest TV", "last TV", "length", "target's", "short")
    return text_table(head, rows)


def draw_instability(path: Path, curve: list[dict], runs: list[dict], targets: list[dict]) -> None:
    """Held-out prompts: the fall and the distance over learning rates, then the distance along training at each."""
    figure, axes = canvas(2, 4, (18, 9))
    panels = {"last": "last accuracy (probability)", "fall": "fall from peak to last accuracy"}
    panels |= {"tv": "total variation to own exact target, last", "length": "mean length, last (tokens)"}
    for i, (measure, label) in enumerate(panels.items()):
        axis, top = axes[0, i], 9 if measure == "length" else 1
        for goal in CORE:
            of = pick(runs, goal=goal.name, split="heldout")
            groups = [[row[measure] for row in pick(of, learning_rate=rate)] for rate in RATES]
            band(axis, RATES, groups, goal.colour, goal.name, 0, top, marker="o", markersize=5)
        (base,) = pick(targets, goal="reference", split="heldout")
        if measure in ("last", "length"):
            level = base["accuracy" if measure == "last" else "length"]
            axis.axhline(level, color=GREY, linestyle="--", linewidth=1.3, label="reference")
        if measure == "length":
            axis.axhline(SHORT, color="black", linestyle=":", label="counts as collapsed below")
        axis.set(xscale="log", xlabel="learning rate", title=label, ylim=(0 if top == 1 else 2.5, top * 1.03))
    for axis, rate in zip(axes[1], RATES, strict=True):
        for goal in CORE:
            of = pick(curve, goal=goal.name, split="heldout", learning_rate=rate)
            groups = [[row["tv"] for row in pick(of, step=step)] for step in UNSTABLE_MEASURED]
            band(axis, UNSTABLE_MEASURED, groups, goal.colour, goal.name, 0, 1)
        axis.set(ylim=(0, 1.03), xlabel="training step", title=f"learning rate {rate:g}")
    axes[1, 0].set(ylabel="total variation to own exact target")
    figure.suptitle(f"Held-out prompts, mean and 95 % interval over {UNSTABLE_SEEDS} seeds", fontsize=15)
    handles, labels = axes[0, 3].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    save_figure(figure, path)


# --- dials ----------------------------------------------------------------------------------------------------------

GRID = {
    "direct": (0.1, 0.3, 0.45, 0.6, 0.75, 0.9),
    "forget": (0.0, 0.5, 0.75, 0.9, 0.95, 1.0),
    "step_error": (0.02, 0.05, 0.15, 0.3, 0.5),
    "order_skew": (0.3, 0.7, 1.0),
}
DIAL_ALPHAS = (1.25, 2.0)
# One reference on each side of zero is pretrained and trained; the default is one, in the other the direct answer and
# the likely one are right.
TRAINED_DIALS = {"negative": {}, "positive": {"direct": 0.6, "forget": 0.25}}
DIAL_STEPS, DIAL_SEEDS, DIAL_RATE = 100, 3, 1e-4


def dials() -> None:
    folder = Folder("dials")
    rows = []
    for values in itertools.product(*GRID.values()):
        task = Scratchpad(**dict(zip(GRID, values, strict=True)))
        rows.append(dict(zip(GRID, values, strict=True)) | analytic_row(task))
    points = [point for name in TRAINED_DIALS for point in trained_points(name)]
    folder.csv("dials", rows)
    folder.csv("trained", points)
    draw_dials(folder.path / "dials.png", rows, points)
    trained = {"dials": TRAINED_DIALS, "steps": DIAL_STEPS, "seeds": DIAL_SEEDS, "learning_rate": DIAL_RATE}
    folder.close(dials_table(rows, points), grid=GRID, alphas=DIAL_ALPHAS, beta_inverse=BETA_INVERSE, trained=trained)


def analytic_outcomes(task: Scratchpad) -> tuple[Tensor, Tensor, Tensor]:
    """log-probabilities, rewards and owner (O,) of all that `sample` can give, every prompt; nothing is left out."""
    listed = [
        (q, math.log(p), task.verify(prompt, text))
        for q, prompt in enumerate(task.prompts)
        for text, p in task.sampling_probs(prompt).items()
    ]
    owner, log_probs, rewards = (torch.tensor(column) for column in zip(*listed, strict=True))
    return log_probs.double(), rewards, owner


def analytic_row(task: Scratchpad) -> dict:
    """Cov(r, log pi_ref) of a reference that is the sampler itself, and the accuracy of each exact target."""
    return covariance_row(*analytic_outcomes(task))


def covariance_row(log_probs: Tensor, rewards: Tensor, owner: Tensor) -> dict:
    covariance = exact.covariance_identity(log_probs, rewards, owner)[1].mean().item()
    row = {"covariance": covariance, "reference": exact._sum(log_probs.exp() * rewards, owner).mean().item()}
    goals = [Goal("sharpen", "sharpen", 1.0, "")]
    goals += [Goal(f"{regime} α={a:g}", regime, a, "") for a in DIAL_ALPHAS for regime in ("temper", "tilt")]
    for goal in goals:
        target = exact.target_log_probs(goal.regime, log_probs, rewards, owner, goal.alpha, BETA_INVERSE)
        row[goal.name] = exact._sum(target.exp() * rewards, owner).mean().item()
    return row | {"task": 1.0}


def dial_world(name: str) -> tuple[Policy, World]:
    task = Scratchpad(**TRAINED_DIALS[name])
    reference = load_reference(task, Shape())
    return reference, World(task, reference, task.train[::4] + task.heldout[::2], 3e-4)


def trained_points(name: str) -> list[dict]:
    """temper with alpha 2, trained from a reference with these dials, all its prompts measured by split."""
    goal, (_, world) = Goal("temper α=2", "temper", 2.0, ""), dial_world(name)
    jobs = [Job(goal, seed, DIAL_RATE, DIAL_STEPS, (0, DIAL_STEPS), prompts=37) for seed in range(DIAL_SEEDS)]
    curve = train_all(jobs, dial_world, (name,))["curve"]
    heldout = torch.tensor([prompt in world.task.heldout for prompt in world.prompts])
    both = exact.covariance_identity(world.reference, world.rewards, world.owner)[1][heldout].mean().item()
    target = world.splits(world.summary(world.target(goal))["accuracy"])["heldout"]
    points = []
    for seed in range(DIAL_SEEDS):
        first, last = pick(curve, seed=seed, split="heldout")
        point = {"dials": name, "seed": seed, "covariance": both, "reference": first["accuracy"]}
        points.append(point | {"trained": last["accuracy"], "target": target, "tv": last["tv"]})
    return points


def agreement(rows: list[dict], name: str) -> tuple[int, int]:
    """How many references, of those it moves at all, it moves the way the covariance says."""
    moved = [row for row in rows if abs(row[name] - row["reference"]) > 1e-9 and abs(row["covariance"]) > 1e-9]
    return sum((row[name] > row["reference"]) == (row["covariance"] > 0) for row in moved), len(moved)


def dials_table(rows: list[dict], points: list[dict]) -> str:
    lines = []
    for name in ("temper α=1.25", "temper α=2", "sharpen", "tilt α=1.25", "tilt α=2"):
        agree, moved = agreement(rows, name)
        gains = {sign: [r[name] - r["reference"] for r in rows if (r["covariance"] > 0) == sign] for sign in (1, 0)}
        values = [f"{np.mean(gain):+.3f} [{min(gain):+.3f}, {max(gain):+.3f}]" for gain in gains.values()]
        lines.append((name, *values, f"{agree} of {moved} ({agree / moved:.3f})"))
    head = ("exact target", "gain where Cov > 0 [range]", "gain where Cov < 0 [range]", "sign as Cov says")
    parts = [f"{len(rows)} references, {sum(r['covariance'] > 0 for r in rows)} of them with Cov(r, log π_ref) > 0"]
    parts += [text_table(head, lines), trained_text(points)]
    return "\n\n".join(parts)


def trained_text(points: list[dict]) -> str:
    lines = []
    for name in TRAINED_DIALS:
        of = pick(points, dials=name)
        values = [f"{of[0][key]:.3f}" for key in ("covariance", "reference", "target")]
        lines.append((name, *values, cell(spread(of, "trained")), cell(spread(of, "tv"))))
    head = ("trained, temper α=2", "Cov (held-out)", "reference", "exact target", "trained", "TV to target")
    return text_table(head, lines)


def draw_dials(path: Path, rows: list[dict], points: list[dict]) -> None:
    """Gain in accuracy of each exact target against the covariance, one dot a reference."""
    figure, axes = canvas(1, 3, (18, 6.4), sharex=True)
    x = np.array([row["covariance"] for row in rows])
    panels = {"temper α=1.25": "sharpened a little: temper, α = 1.25", "temper α=2": "temper, α = 2"}
    panels["sharpen"] = "sharpened to the end: the most likely answer"
    for axis, (name, title) in zip(axes[0], panels.items(), strict=True):
        gain = np.array([row[name] - row["reference"] for row in rows])
        agrees = (gain > 0) == (x > 0)
        for at, colour, label in ((agrees, "#0072B2", "as the sign says"), (~agrees, "#D55E00", "against it")):
            axis.scatter(x[at], gain[at], s=16, alpha=0.55, color=colour, label=f"{label}: {at.sum()}", linewidths=0)
        if name != "sharpen":
            line = np.array([x.min(), x.max()])
            slope = float(name.split("=")[1]) - 1
            axis.plot(line, slope * line, color="black", linewidth=1, label="first order: (α - 1) Cov")
        if name == "temper α=2":
            draw_points(axis, points)
        axis.axhline(0, color=GREY, linestyle="--", linewidth=1.2)
        axis.axvline(0, color=GREY, linestyle="--", linewidth=1.2)
        axis.set(title=title, xlabel="Cov(r, log π_ref) under the reference (nats)")
        axis.legend(frameon=False, loc="upper left" if name != "sharpen" else "lower right")
    axes[0, 0].set(ylabel="accuracy of the exact target - the reference's", ylim=(-0.12, 0.25))
    axes[0, 1].set(ylim=(-0.35, 0.75))
    axes[0, 2].set(ylim=(-0.8, 0.9))
    figure.suptitle(f"Does sharpening help? {len(rows)} scratchpad references, exact targets, no training", fontsize=15)
    save_figure(figure, path)


def draw_points(axis, points: list[dict]) -> None:
    """The two references that were trained: mean and 95 % interval over seeds."""
    for i, name in enumerate(TRAINED_DIALS):
        of = pick(points, dials=name)
        mean, low, high = interval([row["trained"] - row["reference"] for row in of])
        label = f"really trained (held-out, {DIAL_SEEDS} seeds)" if i == 0 else None
        axis.errorbar(of[0]["covariance"], mean, [[mean - low], [high - mean]], fmt="D", color="black", capsize=4,
                      markersize=8, markerfacecolor="#F0E442", zorder=5, label=label)  # fmt: skip


# --- principles -----------------------------------------------------------------------------------------------------

ALPHAS = tuple(np.round(np.geomspace(0.5, 8, 49), 4))
# A reference that is mostly right, whose single most likely completion is short and wrong all the same.
MISLED = {"direct": 0.4, "forget": 0.95, "order_skew": 1.0, "forget_skew": 0.3}
CAPS = (3, 5, 7, 9, 11, 13, 15)
MISLED_PROMPT = "3+4+5="


def principles() -> None:
    folder = Folder("principles")
    _, world = default_world(4, 1e-4)
    identity = identity_rows(world)
    lengths = length_rows()
    misled = misled_rows()
    caps = cap_rows()
    for name, rows in (("identity", identity), ("lengths", lengths), ("most_likely", misled), ("caps", caps)):
        folder.csv(name, rows)
    draw_principles(folder.path / "principles.png", identity, lengths, misled, caps)
    folder.close(principles_table(identity, lengths, misled, caps), dials=MISLED, tree={"prompts": world.prompts})


def identity_rows(world: World) -> list[dict]:
    """Both sides of d/d alpha E[r] = Cov(r, l_ref), on the enumerated default reference; alpha below 1 is pruned's."""
    rows = []
    for alpha in map(float, ALPHAS):
        sides = exact.covariance_identity(world.reference, world.rewards, world.owner, alpha, step=1e-4)
        derivative, covariance = (side.mean().item() for side in sides)
        probs = exact.condition(alpha * world.reference, world.owner).exp()
        accuracy = exact._sum(probs * world.rewards, world.owner).mean().item()
        error = (sides[0] - sides[1]).abs().max().item()
        row = {"alpha": alpha, "accuracy": accuracy, "finite_difference": derivative, "covariance": covariance}
        rows.append(row | {"largest_error": error})
    return rows


def length_rows(vocab: int = 4, stop: float = 0.1) -> list[dict]:
    """Mean length under sequence power and under per-token temperature; the power's is infinite where rho >= 1."""
    rows = []
    for alpha in sorted({*map(float, np.round(np.geomspace(0.95, 4, 40), 4)), 1.0, 1.25, 2.0, 4.0}):
        token = exact.geometric_length_temperature(vocab, stop, alpha)
        rows.append({"alpha": alpha, "sequence": power_length(vocab, stop, alpha), "token": token})
    return rows


def power_length(vocab: int, stop: float, alpha: float) -> float:
    try:
        return exact.geometric_length(vocab, stop, alpha)
    except ValueError:
        return math.inf


def misled_rows() -> list[dict]:
    """The completions of one prompt under the sampler with the dials MISLED, most likely first."""
    task = Scratchpad(**MISLED)
    probs = task.sampling_probs(MISLED_PROMPT)
    return [
        {"completion": text + ".", "probability": p, "right": task.verify(MISLED_PROMPT, text)}
        for text, p in sorted(probs.items(), key=lambda item: -item[1])
    ]


def cap_rows() -> list[dict]:
    """Mean length of pi_ref^alpha under a cap: the stop process in closed form, the default reference by sampling."""
    task = Scratchpad()
    reference, prompts = load_reference(task, Shape()), task.heldout[::5]
    rows = []
    for cap, alpha in itertools.product(CAPS, (0.5, 1.0, 2.0)):
        task.max_new_tokens = cap
        found = exact.sampled_temper_summary(reference, task, prompts, alpha, samples=512)
        row = {"cap": cap, "alpha": alpha, "process": exact.geometric_length(4, 0.1, alpha, max_length=cap)}
        row |= {name: found[name].mean().item() for name in ("length", "accuracy", "effective_samples")}
        rows.append(row | {"error": found["error"].square().mean().sqrt().item() / math.sqrt(len(prompts))})
    return rows


def principles_table(identity: list[dict], lengths: list[dict], misled: list[dict], caps: list[dict]) -> str:
    worst = max(row["largest_error"] for row in identity)
    parts = [f"identity: largest |finite difference - Cov| over {len(identity)} alphas and all prompts: {worst:.1e}"]
    rows = [(f"{r['alpha']:g}", f"{r['sequence']:.2f}", f"{r['token']:.2f}") for r in lengths
            if r["alpha"] in (1, 1.25, 2, 4)]  # fmt: skip
    parts.append(text_table(("alpha", "length, sequence power", "length, token temperature"), rows))
    right = sum(row["probability"] for row in misled if row["right"])
    top = misled[0]
    parts.append(f"most likely of {MISLED_PROMPT} is {top['completion']} with {top['probability']:.3f}, "
                 f"{'right' if top['right'] else 'wrong'}; {right:.3f} of the mass is right")  # fmt: skip
    head = ("cap", "alpha", "stop process", "reference: length", "accuracy", "± error", "effective samples")
    shown = [(str(r["cap"]), f"{r['alpha']:g}", f"{r['process']:.2f}", f"{r['length']:.2f}", f"{r['accuracy']:.3f}",
              f"{r['error']:.3f}", f"{r['effective_samples']:.0f}") for r in caps]  # fmt: skip
    return "\n\n".join((*parts, text_table(head, shown)))


def draw_principles(path: Path, identity, lengths, misled, caps) -> None:
    figure, axes = canvas(2, 2, (15, 11))
    draw_identity(axes[0, 0], identity)
    draw_lengths(axes[0, 1], lengths)
    draw_misled(axes[1, 0], misled)
    draw_caps(axes[1, 1], caps)
    save_figure(figure, path)


def draw_identity(axis, rows: list[dict]) -> None:
    """E[r] over alpha, with the covariance as its slope."""
    alpha = [row["alpha"] for row in rows]
    axis.plot(alpha, [row["accuracy"] for row in rows], color="#009E73", linewidth=2, label="E[r] under π_ref^α")
    axis.plot(alpha, [row["covariance"] for row in rows], color="#0072B2", linewidth=2, label="Cov(r, log π_ref)")
    axis.plot(alpha[::3], [row["finite_difference"] for row in rows[::3]], "o", color="#D55E00", markersize=6,
              markerfacecolor="none", label="dE[r]/dα by finite difference")  # fmt: skip
    axis.axhline(0, color=GREY, linewidth=0.8)
    (one,) = (row["accuracy"] for row in rows if row["alpha"] == 1)
    axis.plot(1, one, "s", color="black", label=f"the reference: {one:.2f}")
    axis.axvspan(0.5, 1, color=GREY, alpha=0.12, linewidth=0)
    axis.text(0.515, -0.12, "α < 1: the\nenumerated part", fontsize=10, color=GREY)
    axis.set(xscale="log", xlabel="α", ylabel="accuracy (probability); its slope (per unit of α)")
    axis.set_xticks((0.5, 1, 2, 4, 8), ("0.5", "1", "2", "4", "8"))
    axis.minorticks_off()
    axis.set_title("a  Sharpening helps where likely and right go together")
    axis.legend(frameon=False)


def draw_lengths(axis, rows: list[dict]) -> None:
    """Sequence power against token temperature, on a process that stops with chance .1."""
    for name, colour, label in (("sequence", "#D55E00", "whole completion to the power α"),
                                ("token", "#0072B2", "every token at temperature 1/α")):  # fmt: skip
        values = [row[name] if row[name] < 1e3 else np.nan for row in rows]
        axis.plot([row["alpha"] for row in rows], values, color=colour, linewidth=2, label=label)
        for row in rows:
            if row["alpha"] in (1, 1.25, 2, 4):
                axis.plot(row["alpha"], row[name], "o", color=colour, markersize=5)
                below = name == "sequence" and row["alpha"] == 1
                text = f"{row[name]:.3g}" if row[name] >= 0.3 else f"{row[name]:.2f}"
                if not below:  # the two agree there
                    where = (8, 8) if row["alpha"] == 1 else (5, 6)
                    axis.annotate(text, (row["alpha"], row[name]), where, textcoords="offset points", color=colour)
    axis.set(
        yscale="log", xlabel="α", ylabel="mean length (tokens, without the stop)", ylim=(5e-3, 400), xlim=(0.85, 4.35)
    )
    axis.set_title("b  Two ways to sharpen, opposite lengths (4 like tokens, stop .1)")
    axis.legend(frameon=False, loc="lower left")


def draw_misled(axis, rows: list[dict]) -> None:
    """The most likely completions of one prompt as bars, and what is right in all."""
    shown, right = rows[:9], sum(row["probability"] for row in rows if row["right"])
    for right_ones, colour in ((True, "#009E73"), (False, "#D55E00")):
        at = [i for i, row in enumerate(shown) if row["right"] == right_ones]
        total = right if right_ones else 1 - right
        label = f"{'right' if right_ones else 'wrong'}: {total:.2f} in all"
        axis.barh(at, [shown[i]["probability"] for i in at], color=colour, label=label)
    for i, row in enumerate(shown):
        axis.annotate(f"{row['probability']:.3f}", (row["probability"], i), (4, 0), textcoords="offset points",
                      va="center")  # fmt: skip
    axis.set_yticks(range(len(shown)), [row["completion"] for row in shown], family="monospace")
    axis.invert_yaxis()
    axis.grid(axis="y", visible=False)
    axis.set(xlabel="probability under the reference", xlim=(0, max(row["probability"] for row in rows) * 1.15))
    axis.set_title(f"c  {MISLED_PROMPT[:-1]}: mostly right, and its likeliest answer short and wrong")
    axis.legend(frameon=False, loc="lower right")


def draw_caps(axis, rows: list[dict]) -> None:
    """alpha = .5 grows with the cap, without end; alpha of 1 or more settles."""
    for alpha, colour in ((0.5, "#CC79A7"), (1.0, GREY), (2.0, "#E69F00")):
        of = pick(rows, alpha=alpha)
        caps = [row["cap"] for row in of]
        axis.plot(caps, [row["length"] for row in of], "o-", color=colour, label=f"scratchpad reference, α = {alpha:g}")
        axis.plot(
            caps, [row["process"] for row in of], ":", color=colour, linewidth=2, label=f"stop process, α = {alpha:g}"
        )
    axis.plot(CAPS, CAPS, color="black", linewidth=0.8, label="the cap itself")
    axis.set(xlabel="length cap (tokens)", ylabel="mean length of π_ref^α under the cap (tokens)")
    axis.set_title("d  α = .5 has no optimum without a cap: it fills whatever it is given")
    axis.legend(frameon=False, ncols=2, fontsize=10)


COMMANDS = {make.__name__: make for make in (regimes, fixed_length, instability, dials, principles)}

if __name__ == "__main__":
    if not sys.argv[1:] or set(sys.argv[1:]) - set(COMMANDS):
        sys.exit(f"usage: python results/sharpening.py NAME ...   with NAME one of {', '.join(COMMANDS)}")
    torch.set_num_threads(1)
    for command in sys.argv[1:]:
        COMMANDS[command]()
