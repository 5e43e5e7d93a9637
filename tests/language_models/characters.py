"""A tokenizer of characters, which stands in for a real one: needs no transformers."""


class Characters:
    """A tokenizer of one id a character, from 3 on; 0 pads, 1 ends, 2 begins a turn of the chat (both special)."""

    alphabet = "".join(map(chr, range(32, 127))) + "\n×"
    chat_template = None

    def __init__(self, **changed):
        vars(self).update(changed)

    def __len__(self):
        return 3 + len(self.alphabet)

    def encode(self, text, add_special_tokens=True):
        return [self.alphabet.index(character) + 3 for character in text]

    def decode(self, ids, skip_special_tokens=False):
        assert skip_special_tokens
        return "".join(self.alphabet[i - 3] for i in ids if i >= 3)

    def apply_chat_template(self, messages, add_generation_prompt, tokenize):
        assert add_generation_prompt and tokenize and [m["role"] for m in messages] == ["user"]
        return [2, *self.encode(messages[0]["content"]), 1, 2]


class Wrapped(Characters):
    """Gives its ids in a mapping, as newer libraries do."""

    def apply_chat_template(self, *args, **options):
        return {"input_ids": super().apply_chat_template(*args, **options), "attention_mask": []}
