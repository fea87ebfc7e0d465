"""RL post-training of language models as Kubeflow Pipelines."""

__version__ = "0.1.0"
