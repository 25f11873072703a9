"""What dispatch and combine mean, in plain torch. Knows no native code, for it judges that."""
