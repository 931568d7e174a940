"""What sending little costs: accuracy and loss, at equal steps and at equal time."""
