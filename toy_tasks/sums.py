"""Write a number as a sum of two digits: "12=" -> "5+7". Up to ten correct answers for one prompt."""

import random

from toy_tasks.task import Task, draw_skewed, last_side


class Sums(Task):
    """Targets 2..16, each with three to ten correct pairs of digits; every third target is held out."""

    name = "sums"
    characters = "0123456789+="
    max_new_tokens = 5  # "5+7." and one more
    pretraining_steps = 200
    targets = range(2, 17)
    train = tuple(f"{t}=" for t in targets if t % 3 != 1)
    heldout = tuple(f"{t}=" for t in targets if t % 3 == 1)
    right, skew = 0.5, 0.7  # share of right answers in the pretraining data, and how uneven its modes are

    def modes(self, prompt: str) -> list[str]:
        """
        >>> Sums().modes("16=")
        ['7+9', '8+8', '9+7']
        """
        target = int(prompt[:-1])
        return [f"{a}+{b}" for a in range(10) for b in range(10) if a + b == target]

    def verify(self, prompt: str, completion: str) -> bool:
        """
        >>> Sums().verify("12=", "5+7"), Sums().verify("12=", "5+8"), Sums().verify("12=", "05+7")
        (True, False, False)
        """
        if len(completion) != 3 or completion[1] != "+":
            return False
        digits = "0123456789"  # not str.isdigit, which also takes "²" and "٣"
        if completion[0] not in digits or completion[2] not in digits:
            return False
        return digits.index(completion[0]) + digits.index(completion[2]) == int(prompt[:-1])

    def parse_answer(self, completion: str) -> str | None:
        """
        >>> [Sums().parse_answer(text) for text in ("Sure! 12 = 5 + 7.", "5+7=12", "15+7", "12=")]
        ['5+7', '5+7', None, None]
        """
        return last_side(r"[0-9]\+[0-9]", completion)

    def sample(self, prompt: str, rng: random.Random) -> str:
        if rng.random() < self.right:
            return draw_skewed(self.modes(prompt), self.skew, rng, salt=prompt)
        return f"{rng.randrange(10)}+{rng.randrange(10)}"

    def plain_language(self, prompt: str) -> str:
        return f"Write {prompt[:-1]} as a sum of two digits, each from 0 to 9. Answer with the sum alone, like 1+2."
