"""What is said to the user: findings and warnings with their codes, errors, the log."""
