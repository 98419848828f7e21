template<int n> struct Show;
