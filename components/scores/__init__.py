from components.scores.component import scores

__all__ = ["scores"]
