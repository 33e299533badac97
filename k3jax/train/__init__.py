"""Training in the manner of the report: Quantile Balancing, per-head Muon, MXFP4 quantisation-aware training."""
