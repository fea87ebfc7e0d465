"""What a run will take, said before any of it is taken: memory, tokens, pods, storage, time and money."""

from ratchet.grains.plan.planning import Plan, Wishes, make_plan

__all__ = ["Plan", "Wishes", "make_plan"]
