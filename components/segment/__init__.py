from components.segment.component import segment

__all__ = ["segment"]
