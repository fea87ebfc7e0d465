from components.checkpoint_export.component import checkpoint_export

__all__ = ["checkpoint_export"]
