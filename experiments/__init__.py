"""The experiments behind README's numbers: `python -m experiments.NAME` writes folders of results/ again."""
