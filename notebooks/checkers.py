"""Checkers of the exercises: each tries an answer against brute force and prints "right: ..." or "not yet: ...".

They are written the slow way, one number at a time. Spoiler: the answers can be read out of them; try first.
"""

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

GROUPS = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 1]]


def _batches() -> list[Tensor]:
    """Batches of rewards (Q, G): a single group, all kinds of groups, and random ones of other sizes."""
    generator = torch.Generator().manual_seed(0)
    random = [torch.randint(0, 2, (Q, G), generator=generator).float() for Q, G in ((1, 2), (3, 8), (5, 5), (16, 8))]
    single = [[1, 1, 0, 0, 0]]  # its counts, 2 and 3, differ from each other and from 1: each mistake shows
    return [torch.tensor(single).float(), torch.tensor(GROUPS).float(), *random]


def _grpo(rewards: Tensor) -> Tensor:
    """(r - mean) / std of each group, population std, 0 for a flat group."""
    rows = []
    for group in rewards.tolist():
        mean = sum(group) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / len(group))
        rows.append([(r - mean) / std if std > 0 else 0.0 for r in group])
    return torch.tensor(rows)


def _iac(advantages: Tensor, rewards: Tensor, alpha: float) -> Tensor:
    rows = []
    for values, group in zip(advantages.tolist(), rewards.tolist(), strict=True):
        failures = sum(r <= 0 for r in group)
        rows.append([a * failures**alpha if a > 0 else a for a in values])
    return torch.tensor(rows)


def _run(function: Callable, *arguments) -> tuple[object, str]:
    """What the student's function returns, or None and what is wrong with it."""
    name = getattr(function, "__name__", "your function")
    try:
        answer = function(*arguments)
    except NotImplementedError:
        return None, f"{name} is still empty; write its body and run the cell again"
    except Exception as error:  # whatever a student's first draft raises is a hint, not a crash
        return None, f"{name} raised {type(error).__name__}: {error}"
    return (None, f"{name} returns nothing yet") if answer is None or answer is ... else (answer, "")


def _call(function: Callable, *arguments, like: Tensor) -> tuple[Tensor | None, str]:
    """What the student's function gives for copies of the arguments, or None and what is wrong with it."""
    name = getattr(function, "__name__", "your function")
    before = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
    answer, wrong = _run(function, *arguments)
    if any(isinstance(x, Tensor) and not x.equal(old) for x, old in zip(arguments, before, strict=True)):
        return None, f"{name} changed its argument in place; make a new tensor"
    if wrong:
        return None, wrong
    if not isinstance(answer, Tensor):
        return None, f"{name} must return a tensor, it returned a {type(answer).__name__}"
    if answer.shape != like.shape:
        return None, f"{name} returned shape {tuple(answer.shape)} for input of shape {tuple(like.shape)}"
    return answer.float(), ""


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def _first_wrong_group(answer: Tensor, truth: Tensor) -> int:
    return next(q for q in range(len(truth)) if not _same(answer[q], truth[q]))


def _rounded(row: Tensor) -> str:
    return str([round(x, 3) for x in row.tolist()])


def check_iac(function: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    """Lesson 1, exercise 1: function(advantages, rewards, alpha) -> calibrated advantages, all tensors (Q, G)."""
    for alpha in (1.0, 2.0, 0.5):
        for rewards in _batches():
            advantages = _grpo(rewards)
            answer, wrong = _call(function, advantages.clone(), rewards.clone(), alpha, like=advantages)
            if answer is None:
                return print(f"not yet: {wrong}")
            truth = _iac(advantages, rewards, alpha)
            if not _same(answer, truth):
                return print(f"not yet: {_iac_hint(answer, advantages, rewards, truth, alpha)}")
    print("right: it agrees with brute force on every batch and every alpha that was tried")


def _iac_hint(answer: Tensor, advantages: Tensor, rewards: Tensor, truth: Tensor, alpha: float) -> str:
    q = _first_wrong_group(answer, truth)
    case = f"for the rewards {rewards[q].int().tolist()} and alpha = {alpha:g} you return {_rounded(answer[q])}"
    negative, positive = advantages < 0, advantages > 0
    if answer.isnan().any():
        return f"{case}; a group without any success has nothing to multiply"
    if not _same(answer[negative], truth[negative]):
        return f"{case}; look at the negative advantages: what does IAC do to them?"
    if alpha != 1:
        return f"{case}; it is right for alpha = 1: where does alpha enter?"
    if _same(answer[positive], advantages[positive]):
        return f"{case}; the positive advantages are still what they were"
    ratio = answer[positive] / truth[positive]
    if _same(ratio, torch.full_like(ratio, 1 / rewards.shape[1])):
        return f"{case}; that is the variant divided by G: the formula above has no such division"
    if len(rewards) > 1:
        return f"{case}; each group has a count of its own: along which axis do you count?"
    return f"{case}; is your count the right answers or the wrong ones?"


def check_diagnosis(suspect: Callable[[Tensor], Tensor], evidence, repair: Callable[[Tensor], Tensor]) -> None:
    """Lesson 1, exercise 2: on the rewards `evidence`, `suspect` is not GRPO; `repair` is the mended function."""
    wrong = _evidence_problem(suspect, evidence)
    print(f"evidence, not yet: {wrong}" if wrong else "evidence, right: on this batch it is not GRPO")
    for rewards in _batches():
        answer, wrong = _call(repair, rewards.clone(), like=rewards)
        if answer is None:
            return print(f"repair, not yet: {wrong}")
        truth = _grpo(rewards)
        if not _same(answer, truth):
            return print(f"repair, not yet: {_repair_hint(repair, answer, rewards, truth)}")
    print("repair, right: it agrees with brute force on every batch that was tried")


def _evidence_problem(suspect: Callable[[Tensor], Tensor], evidence) -> str:
    if evidence is None or evidence is ...:
        return "put a batch of rewards (Q, G) there, for example torch.tensor([[1.0, 0.0, 0.0]])"
    evidence = torch.as_tensor(evidence)
    if evidence.ndim != 2 or evidence.shape[1] < 2:
        return f"rewards have the shape (Q, G) with G of at least 2, yours is {tuple(evidence.shape)}"
    if not ((evidence == 0) | (evidence == 1)).all():
        return "rewards are 0 or 1 here"
    if _same(suspect(evidence.float()), _grpo(evidence)):
        return "on this batch it does what GRPO does; what have all the batches in common that you tried?"
    return ""


def _repair_hint(repair: Callable, answer: Tensor, rewards: Tensor, truth: Tensor) -> str:
    q = _first_wrong_group(answer, truth)
    case = f"for the group {rewards[q].int().tolist()} you return {_rounded(answer[q])}"
    if not answer.isfinite().all():
        return f"{case}; a group in which all are right or all are wrong teaches nothing: its advantage is 0"
    G = rewards.shape[1]
    if _same(answer, truth * math.sqrt((G - 1) / G)):
        return f"{case}; GRPO takes the population std, which divides by G and not by G - 1"
    alone, _ = _call(repair, rewards[q : q + 1].clone(), like=rewards[:1])
    if alone is not None and not _same(alone[0], answer[q]):
        return f"{case}, but {_rounded(alone[0])} when it is the only group of its batch"
    return f"{case}; GRPO gives something else even if this is the only group of its batch"


TAIL_CASES = ((0.6, 0.1, 3), (0.6, 0.1, 1), (0.5, 0.02, 2), (0.9, 0.3, 4), (0.3, 0.05, 6), (0.4, 0.4, 3), (0.5, 0.0, 3))


def _tail_miss(p: float, tau: float, G: int) -> float:
    """Adds up all 3^G groups of the mode, another right answer and a wrong one that are mixed and lack the mode."""
    chance = {"mode": tau, "right": p - tau, "wrong": 1 - p}
    groups = itertools.product(chance, repeat=G)
    return sum(math.prod(chance[answer] for answer in group) for group in groups if set(group) == {"right", "wrong"})


def _tail_mistakes(p: float, tau: float, G: int) -> dict[str, float]:
    """Hint -> the value that the mistake gives."""
    absent, all_right, all_wrong = (1 - tau) ** G, (p - tau) ** G, (1 - p) ** G
    return {
        "that counts every group without the mode, also those that are all right or all wrong": absent,
        "that is the chance that the mode *is* drawn": 1 - absent,
        "groups in which all answers are right are still counted": absent - all_wrong,
        "groups in which all answers are wrong are still counted": absent - all_right,
        "of the groups that are all right, take off only those that you had counted: the ones without the mode": (
            absent - p**G - all_wrong
        ),
        "you multiplied two chances as if they had nothing to do with each other": absent * (1 - p**G - all_wrong),
        "that is the chance of a mixed group, whether it holds the mode or not": 1 - p**G - all_wrong,
    }


def check_tail_miss(function: Callable[[float, float, int], float]) -> None:
    """Lesson 2: function(p, tau, G) -> the chance that a group is mixed and lacks a mode of mass tau."""
    for p, tau, G in TAIL_CASES:
        answer, wrong = _run(function, p, tau, G)
        if wrong:
            return print(f"not yet: {wrong}")
        try:
            answer = float(answer)
        except (TypeError, ValueError, RuntimeError):
            return print(f"not yet: return one number, a probability; this is a {type(answer).__name__}")
        truth = _tail_miss(p, tau, G)
        if not abs(answer - truth) < 1e-6:
            mistakes = _tail_mistakes(p, tau, G).items()
            hint = next((hint for hint, value in mistakes if abs(value - answer) < 1e-6), "count the groups for G = 2")
            return print(f"not yet: p = {p}, tau = {tau}, G = {G}: you return {answer:.4f}; {hint}")
    print("right: it agrees with adding up all groups, for every p, tau and G that was tried")


# (Q, O, D, G, trained, eta); the first shows every mistake by itself
STEP_CASES = ((3, 5, 4, 6, 2, 0.5), (3, 4, 2, 3, 1, 2.0), (2, 6, 3, 8, 0, 0.1), (4, 3, 5, 2, 3, 1.0))


def _step_case(Q: int, O: int, D: int, G: int, trained: int, eta: float) -> tuple:  # noqa: E741
    """pi (Q, O), phi (Q, D), trained, sampled (G,) with an answer drawn twice, advantages (G,), eta."""
    generator = torch.Generator().manual_seed(Q * O * D + G)
    pi = torch.randn(Q, O, generator=generator).softmax(-1)
    phi = torch.randn(Q, D, generator=generator)
    sampled = torch.randint(0, O, (G,), generator=generator)
    sampled[-1] = sampled[0]
    return pi, phi, trained, sampled, 1 + torch.randn(G, generator=generator), eta


def _logit_change(pi: Tensor, phi: Tensor, trained: int, sampled: Tensor, advantages: Tensor, eta: float) -> Tensor:
    """eta (1/G) sum_j A_j (1[o = o_j] - pi(o|q)) phi(q) . phi(q'), one number at a time."""
    rows, draws = [], list(zip(sampled.tolist(), advantages.tolist(), strict=True))
    for other in phi.tolist():
        product = sum(a * b for a, b in zip(other, phi[trained].tolist(), strict=True))
        pulls = [sum(A * ((o == drawn) - p) for drawn, A in draws) for o, p in enumerate(pi[trained].tolist())]
        rows.append([eta * product * pull / len(draws) for pull in pulls])
    return torch.tensor(rows)


def _step_mistakes(pi: Tensor, phi: Tensor, trained: int, sampled: Tensor, A: Tensor, eta: float) -> dict[str, Tensor]:
    """Hint -> what the mistake gives."""
    truth, G, Q = _logit_change(pi, phi, trained, sampled, A, eta), len(sampled), len(pi)

    def other(pi=pi, phi=phi, trained=trained, A=A):
        return _logit_change(pi, phi, trained, sampled, A, eta)

    last = torch.tensor([sampled[j] not in sampled[j + 1 :] for j in range(G)])  # what `x[sampled] = A` leaves
    once = torch.zeros_like(pi[0])
    once[sampled[last]] = A[last]
    once = (once - A.sum() * pi[trained]) / G * eta
    own = torch.stack([other(pi=pi[q].expand_as(pi))[q] for q in range(Q)])
    return {
        "you add over the group; the objective is its mean": truth * G,
        "where does the step size enter?": truth / eta,
        "the sign is the wrong way round: a positive advantage raises what was drawn": -truth,
        "the part with π is missing; a check with advantages that sum to 0 would not notice": other(pi=pi * 0),
        "π is that of the question that is trained, for every row": own,
        "an answer may be drawn twice: add its advantages, do not overwrite (index_add_, or one_hot)": (
            (phi @ phi[trained])[:, None] * once
        ),
        "every question moves alike: where do the embeddings enter?": other(phi=torch.ones(Q, 1)),
        "only the trained question moves: what do the others share with it?": (
            truth * (torch.arange(Q) == trained)[:, None]
        ),
        "that is the cosine; these embeddings are not of length 1, the formula has the plain product": other(
            phi=phi / phi.norm(dim=-1, keepdim=True)
        ),
        "another question is trained here: use the argument `trained`": other(trained=1),
        "that is the change of log π; the exercise asks for the logits z": truth - (pi * truth).sum(-1, keepdim=True),
    }


def check_coupling(function: Callable) -> None:
    """Lesson 3: function(pi, phi, trained, sampled, A, eta) -> the change of every logit of every question, (Q, O)."""
    for sizes in STEP_CASES:
        case = _step_case(*sizes)
        answer, wrong = _call(function, *case, like=case[0])
        if answer is None:
            return print(f"not yet: {wrong}")
        truth = _logit_change(*case)
        if not _same(answer, truth):
            q, o = (int(i) for i in ((answer - truth).abs() > 1e-4).logical_or(answer.isnan()).nonzero()[0])
            known = _step_mistakes(*case).items()
            hint = next((hint for hint, value in known if _same(answer, value)), "do it by hand for G = 1")
            said = f"question {q}, answer {o}: you return {answer[q, o]:.4f}, it is {truth[q, o]:.4f}"
            return print(f"not yet: with {len(case[0])} questions of which {case[2]} is trained, {said}; {hint}")
    print("right: it agrees with brute force for every policy, embedding and group that was tried")


TILT_CASES = (  # log-probabilities, rewards, alpha, b
    ([-0.5, -1.5, -2.5, -2.0], [0, 1, 1, 0], 1.0, 2.0),
    ([-0.5, -1.5, -2.5, -2.0], [0, 1, 1, 0], 2.0, 0.0),
    ([-0.5, -1.5, -2.5, -2.0], [0, 1, 1, 0], 2.0, 3.0),
    ([-3.0, -1.0, -1.2], [1, 0, 1], 0.5, 1.0),
    ([-900.0, -901.0, -903.0], [1, 0, 1], 4.0, 1.0),  # a long text: exp of these is 0
)


def _shares(logs: list[float]) -> list[float]:
    """exp of each, over their sum."""
    weights = [math.exp(x - max(logs)) for x in logs]
    return [w / sum(weights) for w in weights]


def _tilt(logs: list[float], rewards: list[int], alpha: float, b: float) -> list[float]:
    return _shares([alpha * x + b * r for x, r in zip(logs, rewards, strict=True)])


def _tilt_mistakes(logs: list[float], rewards: list[int], alpha: float, b: float) -> dict[str, list[float]]:
    """Hint -> what the mistake gives."""
    pairs = list(zip(logs, rewards, strict=True))
    return {
        "these do not sum to 1: what is Z?": [math.exp(alpha * x + b * r) for x, r in pairs],
        "these are logarithms; return probabilities": [math.log(p) for p in _tilt(logs, rewards, alpha, b)],
        "the rewards make no difference yet": _shares([alpha * x for x in logs]),
        "alpha makes no difference yet": _shares([x + b * r for x, r in pairs]),
        "alpha is the power of the reference alone, not of the reward's factor": (
            _shares([alpha * (x + b * r) for x, r in pairs])
        ),
        "alpha is the power of a *probability*: it multiplies the logarithm": (
            _shares([x + math.log(alpha) + b * r for x, r in pairs])
        ),
        "the reward's factor is exp(b r), larger for larger b": (
            _shares([alpha * x + r / b for x, r in pairs]) if b else []
        ),
        "the reference's power is alpha, not alpha - 1: the reward has another l_ref beside it": (
            _shares([(alpha - 1) * x + b * r for x, r in pairs])
        ),
    }


def check_tilt(function: Callable[[Tensor, Tensor, float, float], Tensor]) -> None:
    """Lesson 4, exercise 1: function(log_probs, rewards, alpha, b) -> the target's probabilities, all tensors (O,)."""
    for logs, rewards, alpha, b in TILT_CASES:
        log_probs = torch.tensor(logs, dtype=torch.float64)
        answer, wrong = _call(function, log_probs, torch.tensor(rewards, dtype=torch.float64), alpha, b, like=log_probs)
        if answer is None:
            return print(f"not yet: {wrong}")
        if not _same(answer, torch.tensor(_tilt(logs, rewards, alpha, b))):
            case = f"log_probs = {logs}, rewards = {rewards}, alpha = {alpha:g}, b = {b:g}: you return"
            return print(f"not yet: {case} {_rounded(answer)}; {_tilt_hint(answer, logs, rewards, alpha, b)}")
    print("right: it agrees with brute force on every case that was tried")


def _tilt_hint(answer: Tensor, logs: list[float], rewards: list[int], alpha: float, b: float) -> str:
    if min(logs) < -700:
        return "the powers of such small probabilities are 0 to the computer: stay with logarithms until the end"
    mistakes = _tilt_mistakes(logs, rewards, alpha, b).items()
    found = (hint for hint, value in mistakes if value and _same(answer, torch.tensor(value)))
    return next(found, "write down log_probs * alpha + b * rewards, and make it a distribution")


def _accuracy(task, prompt: str, alpha: float) -> float:
    """Of p^alpha / Z, p being what the world's own sampler writes."""
    probs = task.sampling_probs(prompt)
    right = sum(p**alpha for text, p in probs.items() if task.verify(prompt, text))
    return right / sum(p**alpha for p in probs.values())


def _slope(task) -> float:
    """d accuracy / d alpha at alpha = 1, a finite difference, mean over the prompts."""
    rises = [(_accuracy(task, q, 1 + 1e-4) - _accuracy(task, q, 1 - 1e-4)) / 2e-4 for q in task.train]
    return sum(rises) / len(rises)


def check_predictions(worlds: dict, predictions: dict) -> None:
    """Lesson 4, exercise 2: name of a world -> "rises" or "falls", what its accuracy does as alpha leaves 1 upwards."""
    unsaid = [name for name in worlds if predictions.get(name) not in ("rises", "falls")]
    if unsaid:
        return print(f'not yet: predict "rises" or "falls" for {", ".join(unsaid)}')
    slopes = {name: _slope(task) for name, task in worlds.items()}
    hits = sum((slope > 0) == (predictions[name] == "rises") for name, slope in slopes.items())
    if hits < len(worlds):
        hint = "for each, ask of the likely completions, not of the single most likely one: are they correct?"
        return print(f"not yet: {hits} of {len(worlds)} hold; {hint}")
    print("right: the slopes are", ", ".join(f"{slope:+.3f} ({name})" for name, slope in slopes.items()))
