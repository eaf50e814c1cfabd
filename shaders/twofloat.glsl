// Sums of two floats, high + low with |low| <= ulp(high) / 2: about 48 bits. `precise` keeps the compiler from
// contracting or reordering what the error terms are made of (Dekker 1971, Knuth 4.2.2).

vec2 two_sum(float a, float b) {
    precise float sum = a + b;
    precise float of_b = sum - a;
    precise float error = (a - (sum - of_b)) + (b - of_b);
    return vec2(sum, error);
}

vec2 two_add(vec2 a, float b) {
    const vec2 s = two_sum(a.x, b);
    precise float low = s.y + a.y;
    return two_sum(s.x, low);
}

vec2 two_add(vec2 a, vec2 b) {
    const vec2 s = two_sum(a.x, b.x);
    precise float low = s.y + (a.y + b.y);
    return two_sum(s.x, low);
}

// Upper half of the bits. |a| < 2^115.
float upper_half(float a) {
    precise float scaled = 4097.0 * a;
    precise float rest = scaled - a;
    precise float upper = scaled - rest;
    return upper;
}

vec2 two_mul(vec2 a, vec2 b) {
    precise float product = a.x * b.x;
    const float ah = upper_half(a.x), bh = upper_half(b.x);
    precise float al = a.x - ah;
    precise float bl = b.x - bh;
    precise float error = ((ah * bh - product) + ah * bl + al * bh) + al * bl;
    precise float low = error + (a.x * b.y + a.y * b.x);
    return two_sum(product, low);
}

bool greater(vec2 a, vec2 b) {
    return a.x > b.x || (a.x == b.x && a.y > b.y);
}

// log(t), t >= 1, to a few 1e-8 near t = 1 and one rounding elsewhere: the built-in promises 2^-21 there.
float two_log(vec2 t) {
    int exponent = int(floatBitsToUint(t.x) >> 23) - 127;
    float scale = uintBitsToFloat(uint(127 - exponent) << 23);
    if (t.x * scale > 1.41421356) {
        exponent += 1;
        scale *= 0.5;
    }
    precise float f = (t.x * scale - 1.0) + t.y * scale;
    precise float s = f / (2.0 + f);
    precise float q = s * s;
    precise float series = 2.0 * s * (1.0 + q * (0.333333333 + q * (0.2 + q * (0.142857143 + q * 0.111111111))));
    const float n = float(exponent);
    precise float result = n * 0.693359375 + (n * -2.12194440e-4 + series);
    return result;
}
