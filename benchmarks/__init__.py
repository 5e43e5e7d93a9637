"""What a step costs, beside its peers; how that grows; where the time goes: `python -m benchmarks.NAME`."""
