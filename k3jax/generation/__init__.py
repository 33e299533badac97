"""From prompts to text: buckets, decode loop, stopping, results."""
