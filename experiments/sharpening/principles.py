"""First principles: the identity, the length's closed form, the most likely completion, alpha below 1."""

import itertools
import math
from pathlib import Path

import numpy as np

from experiments.drawing import BLUE, GREEN, GREY, ORANGE, PINK, RED, canvas, save
from experiments.shared import pick, text_table
from experiments.sharpening.tables import Folder
from experiments.sharpening.world import Recipe, World, by_prompt, make_world
from lab.reference import load_reference
from lab.settings import Shape
from toy_tasks import Scratchpad, sharpening

ALPHAS = tuple(np.round(np.geomspace(0.5, 8, 49), 4))
# A reference that is mostly right, whose single most likely completion is short and wrong all the same.
MISLED = {"direct": 0.4, "forget": 0.95, "order_skew": 1.0, "forget_skew": 0.3}
CAPS = (3, 5, 7, 9, 11, 13, 15)
MISLED_PROMPT = "3+4+5="


def principles() -> None:
    """results/sharpening_principles."""
    folder = Folder("principles")
    world = make_world(Recipe(every=4, min_mass=1e-4))
    identity, lengths, misled, caps = identity_rows(world), length_rows(), misled_rows(), cap_rows()
    for name, rows in (("identity", identity), ("lengths", lengths), ("most_likely", misled), ("caps", caps)):
        folder.csv(name, rows)
    draw(folder.path / "principles.png", identity, lengths, misled, caps)
    folder.close(table(identity, lengths, misled, caps), dials=MISLED, tree={"prompts": world.prompts})


def identity_rows(world: World) -> list[dict]:
    """Both sides of d/d alpha E[r] = Cov(r, l_ref), on the enumerated default reference; alpha below 1 is pruned's."""
    rows = []
    for alpha in map(float, ALPHAS):
        sides = sharpening.covariance_identity(world.reference_log_probs, world.rewards, world.owner, alpha, step=1e-4)
        derivative, covariance = (side.mean().item() for side in sides)
        probs = sharpening.condition(alpha * world.reference_log_probs, world.owner).exp()
        accuracy = by_prompt(probs * world.rewards, world.owner).mean().item()
        error = (sides[0] - sides[1]).abs().max().item()
        row = {"alpha": alpha, "accuracy": accuracy, "finite_difference": derivative, "covariance": covariance}
        rows.append(row | {"largest_error": error})
    return rows


def length_rows(vocab: int = 4, stop: float = 0.1) -> list[dict]:
    """Mean length under sequence power and under per-token temperature; the power's is infinite where rho >= 1."""
    rows = []
    for alpha in sorted({*map(float, np.round(np.geomspace(0.95, 4, 40), 4)), 1.0, 1.25, 2.0, 4.0}):
        token = sharpening.geometric_length_temperature(vocab, stop, alpha)
        rows.append({"alpha": alpha, "sequence": power_length(vocab, stop, alpha), "token": token})
    return rows


def power_length(vocab: int, stop: float, alpha: float) -> float:
    """`geometric_length`, and infinity where that has none."""
    try:
        return sharpening.geometric_length(vocab, stop, alpha)
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
        found = sharpening.sampled_temper_summary(reference, task, prompts, alpha, samples=512)
        row = {"cap": cap, "alpha": alpha, "process": sharpening.geometric_length(4, 0.1, alpha, max_length=cap)}
        row |= {name: found[name].mean().item() for name in ("length", "accuracy", "effective_samples")}
        rows.append(row | {"error": found["error"].square().mean().sqrt().item() / math.sqrt(len(prompts))})
    return rows


# --- table and figure -----------------------------------------------------------------------------------------------


def table(identity: list[dict], lengths: list[dict], misled: list[dict], caps: list[dict]) -> str:
    """The largest error, the lengths, the likeliest completion and the caps."""
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


def draw(path: Path, identity: list[dict], lengths: list[dict], misled: list[dict], caps: list[dict]) -> None:
    """A panel each."""
    figure, axes = canvas(2, 2, (15, 11))
    draw_identity(axes[0, 0], identity)
    draw_lengths(axes[0, 1], lengths)
    draw_misled(axes[1, 0], misled)
    draw_caps(axes[1, 1], caps)
    save(figure, path)


def draw_identity(axis, rows: list[dict]) -> None:
    """E[r] over alpha, with the covariance as its slope."""
    alpha = [row["alpha"] for row in rows]
    axis.plot(alpha, [row["accuracy"] for row in rows], color=GREEN, linewidth=2, label="E[r] under π_ref^α")
    axis.plot(alpha, [row["covariance"] for row in rows], color=BLUE, linewidth=2, label="Cov(r, log π_ref)")
    axis.plot(alpha[::3], [row["finite_difference"] for row in rows[::3]], "o", color=RED, markersize=6,
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
    for name, colour, label in (("sequence", RED, "whole completion to the power α"),
                                ("token", BLUE, "every token at temperature 1/α")):  # fmt: skip
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
    for right_ones, colour in ((True, GREEN), (False, RED)):
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
    for alpha, colour in ((0.5, PINK), (1.0, GREY), (2.0, ORANGE)):
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
