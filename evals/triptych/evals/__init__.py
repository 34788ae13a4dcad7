"""Quality of compressed caches: studies of methods, baselines, metrics and calibration."""
