"""What is learned: data sets, models, and how data is divided among nodes."""
