// From a raw product of the head to its z, and exp of differences of z: the arithmetic of cpu/intrinsics.py, so that a
// device's own exp and tanh (2^-11 for some) do not decide a token. `precise`: the same on every device but for division.

#define MINUS_INFINITY uintBitsToFloat(0xFF800000u)

// exp(x): coefficients of Cephes expf. Below -87.3 it is 0; at most exp(88.7).
float exp32(float x) {
    const float bounded = clamp(x, -87.33654, 88.0);
    precise float n = floor(bounded * 1.44269502 + 0.5);
    precise float r = (bounded - n * 0.693359375) + n * 2.12194440e-4;
    precise float p = 1.9875691500e-4 * r + 1.3981999507e-3;
    p = p * r + 8.3334519073e-3;
    p = p * r + 4.1665795894e-2;
    p = p * r + 1.6666665459e-1;
    p = p * r + 5.0000001201e-1;
    p = p * (r * r) + (r + 1.0);
    const float result = p * uintBitsToFloat(uint(int(n) + 127) << 23);
    return x < -87.33654 ? 0.0 : result;
}

// tanh(x): an odd polynomial for |x| < 0.625 (Cephes tanhf), 1 - 2 / (exp(2|x|) + 1) beyond, 1 from 10 on.
float tanh32(float x) {
    const float size = abs(x);
    precise float square = x * x;
    precise float p = -5.70498872745e-3 * square + 2.06390887954e-2;
    p = p * square - 5.37397155531e-2;
    p = p * square + 1.33314422036e-1;
    p = p * square - 3.33332819422e-1;
    p = p * square * x + x;
    precise float large = 1.0 - 2.0 / (exp32(2.0 * size) + 1.0);
    large = size < 10.0 ? large : 1.0;
    return size < 0.625 ? p : x < 0.0 ? -large : large;
}

// softcap * tanh(product / softcap) * inverse_temperature; softcap 0: none.
float squash(float product, float softcap, float inverse_temperature) {
    precise float z = product;
    if (softcap != 0.0) {
        z = softcap * tanh32(product / softcap);
    }
    z = z * inverse_temperature;
    return z;
}
