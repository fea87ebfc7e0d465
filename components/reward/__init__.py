from components.reward.component import reward

__all__ = ["reward"]
