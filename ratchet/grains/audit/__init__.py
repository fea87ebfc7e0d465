"""`ratchet audit` and `ratchet sample`: why a model exists, and what one of its completions did."""

from ratchet.grains.audit.reading import audit
from ratchet.grains.audit.records import Audit
from ratchet.grains.audit.sample import Sample, find_sample
from ratchet.grains.audit.subject import Subject, find_subject

__all__ = ["Audit", "Sample", "Subject", "audit", "find_sample", "find_subject"]
