"""An OpenAI-compatible server. One thread runs the engine; everything async lives in this package and nowhere else."""
