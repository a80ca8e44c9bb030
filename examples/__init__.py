"""Small trainings that show how the package is used."""
