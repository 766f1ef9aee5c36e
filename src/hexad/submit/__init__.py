"""Jobs for engines that run clusters: SLURM, Ray, Kubernetes, SkyPilot. Each engine turns a :class:`Job` into
the file that its own users would write, submits it with its own command, and follows its log. No torch."""

from .engine import ENGINES, Engine, Submitted, engine
from .job import Job, make_job, option_pairs
