from components.critic_update.component import critic_update

__all__ = ["critic_update"]
