"""What every folder may use; itself it knows errors alone."""
