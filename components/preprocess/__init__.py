from components.preprocess.component import preprocess

__all__ = ["preprocess"]
