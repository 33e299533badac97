"""Load on a service: requests at a rate or by so many readers, and how long each token took."""
