from components.rollout.component import rollout

__all__ = ["rollout"]
