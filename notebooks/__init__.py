"""Four lessons; what they draw with (`drawing`), and the checkers of their exercises."""
