from components.advantage.component import advantage

__all__ = ["advantage"]
