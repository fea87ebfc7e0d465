from components.policy_update.component import policy_update

__all__ = ["policy_update"]
