from components.step.component import step

__all__ = ["step"]
