from components.promote.component import promote

__all__ = ["promote"]
