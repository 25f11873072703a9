"""Programs beside a job: the doctor, the calibration of NICs."""
