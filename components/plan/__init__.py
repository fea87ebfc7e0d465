from components.plan.component import plan

__all__ = ["plan"]
