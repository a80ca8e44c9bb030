"""Operations whose speed decides: each file holds the plain torch reference and the public function."""
