"""What stands between the products of a draft's layer."""
